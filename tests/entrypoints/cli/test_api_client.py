"""``vllm chat`` and ``vllm complete`` against a server that is a function."""

import argparse
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from vllm.entrypoints.cli import chat, complete
from vllm.entrypoints.cli.api_client import ApiClient
from vllm.entrypoints.cli.conversation import read_lines
from vllm.entrypoints.cli.main import main, make_parser
from vllm.exceptions import EngineError, UserInputError

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
}


CARDS = [{"id": "first"}, {"id": "second", "default_sampling_params": {"temperature": 0.3}}]


class FakeServer:
    """Answers with the pieces it was told; remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.pieces: list[dict[str, str]] = [{"content": "Hel"}, {"content": "lo"}]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer."""
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": CARDS})
        self.bodies.append(json.loads(request.content))
        is_chat = request.url.path == "/v1/chat/completions"
        choices = [
            {"index": 0, "delta": piece} if is_chat else {"index": 0, "text": piece["content"]}
            for piece in self.pieces
        ]
        chunks = [{"choices": [c]} for c in choices] + [{"choices": [], "usage": USAGE}]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return httpx.Response(200, text=": hello\n\n" + "".join(events) + "data: [DONE]\n\n")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server for whatever the commands send."""
    server = FakeServer()

    def from_args(args: argparse.Namespace) -> ApiClient:
        transport = httpx.MockTransport(server)
        return ApiClient(args.url, args.model_name, args.api_key, transport)

    monkeypatch.setattr(ApiClient, "from_args", from_args)
    return server


def _run(run: Callable[[argparse.Namespace], int], *arguments: str) -> None:
    assert run(make_parser().parse_args(arguments)) == 0


def test_a_quick_message(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    _run(chat.run, "chat", "-q", "Hi", "--system-prompt", "Be kind.", "--stats", "--api-key", "k")
    printed = capsys.readouterr()
    assert printed.out == "Hello\n"
    assert "9 prompt tokens, 4 of them cached (44%); 2 generated" in printed.err
    (body,) = fake.bodies
    assert (body["model"], body["stream"]) == ("first", True)
    assert body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer k"}


def test_a_conversation_remembers(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nnever sent\n"))
    fake.pieces.insert(0, {"reasoning": "hmm"})
    _run(chat.run, "chat", "--model-name", "second")
    printed = capsys.readouterr()
    assert printed.out == "Hello\nHello\n"
    counts = "[9 prompt tokens, 4 of them cached (44%); 2 generated]"
    assert printed.err == f"Using model: second\nhmm\n{counts}\nhmm\n{counts}\n"
    assert [body["model"] for body in fake.bodies] == ["second", "second"]
    assert [m["content"] for m in fake.bodies[1]["messages"]] == ["one", "Hello", "two"]


def test_completions(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo"))
    _run(complete.run, "complete", "--max-tokens", "1k")
    _run(complete.run, "complete", "-q", "three")
    assert capsys.readouterr().out == "Hello\n" * 3
    assert [body["prompt"] for body in fake.bodies] == ["one", "two", "three"]
    assert [body.get("max_tokens") for body in fake.bodies] == [1000, 1000, 128]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_sampling_is_a_flags_then_the_checkpoints_then_usual(
    fake: FakeServer, command: str
) -> None:
    run = {"chat": chat.run, "complete": complete.run}[command]
    own = ("--model", "second")
    _run(run, command, "-q", "Hi")
    _run(run, command, "-q", "Hi", "--temperature", "0", "--top-p", "0.5", "--seed", "3")
    _run(run, command, "-q", "Hi", *own)
    _run(run, command, "-q", "Hi", *own, "--temperature", "0")
    names = ("temperature", "top_p", "seed")
    assert [tuple(body.get(name) for name in names) for body in fake.bodies] == [
        (0.7, 0.95, None),
        (0.0, 0.5, 3),
        (None, 0.95, None),  # the server has the checkpoint's own
        (0.0, 0.95, None),
    ]
    assert all(body["max_tokens"] > 0 for body in fake.bodies)


def test_ctrl_c_ends_an_answer_and_not_the_program(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    stream = ApiClient.stream
    turns: list[str] = []

    def interrupted(self: ApiClient, path: str, body: Any) -> Iterator[Any]:
        turns.append(path)
        for choice in stream(self, path, body):
            yield choice
            if len(turns) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(ApiClient, "stream", interrupted)
    _run(chat.run, "chat")
    printed = capsys.readouterr()
    assert printed.out == "Hel\nHello\n"
    assert "(stopped)" in printed.err
    # What was said of it stays in the conversation.
    assert [m["content"] for m in fake.bodies[1]["messages"]] == ["one", "Hel", "two"]
    turns.clear()
    with pytest.raises(KeyboardInterrupt):
        chat.run(make_parser().parse_args(["chat", "-q", "one"]))


def test_ctrl_c_drops_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter([KeyboardInterrupt(), "one", EOFError()])

    def read(sign: str) -> str:
        item = next(typed)
        if isinstance(item, BaseException):
            raise item
        return item

    monkeypatch.setattr("builtins.input", read)
    assert list(read_lines("> ")) == ["one"]
    assert "Ctrl-D ends" in capsys.readouterr().err


def _client(handler: Callable[[httpx.Request], httpx.Response]) -> ApiClient:
    return ApiClient("http://s/v1/", "m", transport=httpx.MockTransport(handler))


@pytest.mark.parametrize(
    ("response", "kind", "text"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), UserInputError, "too long"),
        (httpx.Response(401, json={"error": "Unauthorized"}), UserInputError, "Unauthorized"),
        (httpx.Response(502, text="<html>"), EngineError, "502: <html>"),
        (
            httpx.Response(200, text='data: {"error": {"message": "it died"}}\n\n'),
            EngineError,
            "it died",
        ),
    ],
)
def test_what_a_server_refuses(response: httpx.Response, kind: type[Exception], text: str) -> None:
    with _client(lambda _: response) as client, pytest.raises(kind, match=text):
        list(client.stream("/completions", {}))


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 is nobody's; the command says what to do, without a traceback.
    assert main(["complete", "--url", "http://127.0.0.1:1/v1", "-q", "x"]) == 1
    message = capsys.readouterr().err
    assert "is a server running there?" in message
    assert "Traceback" not in message


def test_a_certificate_that_is_not_known() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", request=request)

    with _client(refuse) as client, pytest.raises(EngineError, match=r"\): set SSL_CERT_FILE"):
        list(client.stream("/completions", {}))
