"""Bad requests: a clean 4xx with the one body shape, a server that lives, no block leaked."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

# What is wrong is found before the engine, whatever the platform.
pytestmark = pytest.mark.parametrize("platform", ["cpu"], indirect=True)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "hi"}]
# Its schema is none, which shows when a call is forced.
TOOL: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]

# path, body, status, param
BAD_BODIES: list[tuple[str, Any, int, str | None]] = [
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "model": "gpt-9"}, 404, "model"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "x"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**9]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [7] * 16384}, 400, "input_tokens"),
    (COMPLETIONS, {"prompt": [7] * 16384, "stream": True}, 400, "input_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 16385}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**40}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "1"}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "temperature": False}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "stream": 1}, 400, "stream"),
    (COMPLETIONS, {"prompt": "x", "stream": "true"}, 400, "stream"),
    (COMPLETIONS, {"prompt": "x", "echo": "no"}, 400, "echo"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 16385}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 2, "temperature": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": 2.1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -5}, 400, "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 1.5}, 400, "min_p"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}, 400, "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, 400, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 129}, 400, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": 5}, 400, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-3]}, 400, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 40}, 400, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {}}, 400, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"2048": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [-1]}, 400, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "bad_words": [""]}, 400, "bad_words"),
    (COMPLETIONS, {"prompt": "x", "thinking_token_budget": -1}, 400, "thinking_token_budget"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": 2.5}, 400, "presence_penalty"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, 400, "use_beam_search"),
    (COMPLETIONS, {"prompt": "x", "priority": 1}, 400, "priority"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "a/b"}, 400, "cache_salt"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "pope", "content": "x"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [], "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": USER, "tools": TOOL, "tool_choice": {"type": "x"}}, 400, "tool_choice"),
    (CHAT, {"messages": USER, "tools": TOOL, "tool_choice": "required"}, 400, "tools"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [{}]}]}, 400, "messages"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
    (CHAT, {"messages": USER, "structured_outputs": {"regex": 1}}, 400, "structured_outputs"),
    (CHAT, {"messages": USER, "structured_outputs": {}}, 400, "structured_outputs"),
    (CHAT, {"messages": USER, "guided_json": {"type": "thing"}}, 400, "guided_json"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": USER, "reasoning_effort": "huge"}, 400, "reasoning_effort"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"a": 1}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "continue_final_message": True}, 400, "continue_final_message"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
]

JSON_TYPE = {"Content-Type": "application/json"}
RAW_BODIES: list[tuple[str, bytes, dict[str, str]]] = [
    ("cut off", b'{"prompt": "x"', JSON_TYPE),
    ("a list", b"[1, 2]", JSON_TYPE),
    ("a text", b'"x"', JSON_TYPE),
    ("nothing", b"", JSON_TYPE),
    ("bad UTF-8", b'{"prompt": "\xff\xfe"}', JSON_TYPE),
    ("lone surrogate", b'{"prompt": "\\ud800"}', JSON_TYPE),
    ("surrogate in a name", b'{"prompt": "x", "model": "\\udfff"}', JSON_TYPE),
    ("surrogate in stop", b'{"prompt": "x", "stop": ["a", "\\ud800"]}', JSON_TYPE),
    ("surrogate in a salt", b'{"prompt": "x", "cache_salt": "\\ud800"}', JSON_TYPE),
    ("too deep", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON_TYPE),
    ("endless number", b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", JSON_TYPE),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', JSON_TYPE),
    ("no type", b'{"prompt": "x"}', {}),
    ("wrong type", b'{"prompt": "x"}', {"Content-Type": "text/plain"}),
]


def check_error(
    response: httpx.Response, status: int, param: str | None = None, code: int | str | None = None
) -> None:
    """Check the one shape of an error; its code is the status unless another is known by name."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == (status if code is None else code)
    assert error["message"]
    assert error["type"].endswith("Error")
    if param is not None:
        assert error["param"] == param, error


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD_BODIES)
def test_bad_field(
    server: ServerProcess, path: str, body: Any, status: int, param: str | None
) -> None:
    # Clients shorten a conversation when they read this code.
    code = "context_length_exceeded" if param == "input_tokens" else None
    check_error(server.post(path, body), status, param, code)


@pytest.mark.parametrize(("name", "content", "headers"), RAW_BODIES)
def test_bad_body(
    server: ServerProcess, name: str, content: bytes, headers: dict[str, str]
) -> None:
    url = server.url + COMPLETIONS
    check_error(httpx.post(url, content=content, headers=headers, timeout=60), 400)


def test_unknown_route_and_method(server: ServerProcess) -> None:
    check_error(server.get("/v1/nothing"), 404)
    response = server.get(COMPLETIONS)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    check_error(server.get("/v1/models/other"), 404, "model")


def test_too_large_a_body(server: ServerProcess) -> None:
    def chunks() -> Any:
        for _ in range(65):
            yield b" " * 1024 * 1024

    url = server.url + COMPLETIONS
    check_error(httpx.post(url, content=chunks(), headers=JSON_TYPE, timeout=30), 413)


# A schema that no grammar can be made of, and where the APIs put schemas of tools and of answers.
NO_SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "thing"}}}
A_SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
DEEP: Any = {"not": json.loads('{"not": ' * 70 + "{}" + "}" * 70)}


def chat_with(form: Any, tool: Any) -> tuple[str, dict[str, Any]]:
    """A chat with a form, a tool and none of both, as their schemas say."""
    body: dict[str, Any] = {"messages": USER, "max_tokens": 4}
    if form:
        named = {"name": "answer", "schema": form}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    if tool:
        function = {"name": "store", "parameters": tool, "strict": True}
        body["tools"] = [{"type": "function", "function": function}]
    return CHAT, body


def response_with(form: Any, tool: Any) -> tuple[str, dict[str, Any]]:
    """The same for Responses."""
    body: dict[str, Any] = {"input": "hi", "max_output_tokens": 4}
    if form:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": form}}
    if tool:
        body["tools"] = [{"type": "function", "name": "store", "parameters": tool, "strict": True}]
    return "/v1/responses", body


def message_with(form: Any, tool: Any) -> tuple[str, dict[str, Any]]:
    """The same for Messages."""
    body: dict[str, Any] = {"messages": USER, "max_tokens": 4}
    if form:
        body["output_config"] = {"format": {"type": "json_schema", "schema": form}}
    if tool:
        body["tools"] = [{"name": "store", "input_schema": tool, "strict": True}]
    return "/v1/messages", body


FORM_FIELDS: list[tuple[Any, str]] = [
    (chat_with, "response_format"),
    (response_with, "text.format"),
    (message_with, "output_config.format"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("make", "field"), FORM_FIELDS)
@pytest.mark.parametrize("bad", [NO_SCHEMA, DEEP], ids=["no schema", "deep"])
def test_errors_of_schemas_name_what_was_sent(
    server: ServerProcess, make: Any, field: str, stream: bool, bad: Any
) -> None:
    for (path, body), named in (
        (make(bad, None), field),
        (make(bad, A_SCHEMA), field),
        (make(A_SCHEMA, bad), "tools: function 'store', argument 'a'"),
    ):
        if bad is DEEP and named != field:
            named = "tools: function 'store'"
        response = server.post(path, {**body, "stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["message"].startswith(f"{named} "), error
        assert "structured_outputs" not in response.text
        assert "x-guidance" not in response.text
        # Anthropic's errors have no such member.
        assert error.get("param", named.split(":")[0]) == named.split(":")[0]


def test_errors_of_schemas_with_several_answers(server: ServerProcess) -> None:
    path, body = chat_with(NO_SCHEMA, None)
    check_error(server.post(path, {**body, "n": 2, "stream": True}), 400, "response_format")
    body = {"prompt": ["x", "y"], "guided_json": NO_SCHEMA, "n": 2}
    check_error(server.post(COMPLETIONS, body), 400, "guided_json")
    # Their grammar is one text.
    path, body = chat_with({"enum": ["a" * 1_100_000]}, A_SCHEMA)
    response = server.post(path, body)
    check_error(response, 400, "tools")
    assert response.json()["error"]["message"].startswith("tools and response_format: ")
    # A tag of the client's own says itself where calls stand.
    tag = {"type": "structural_tag", "format": {"type": "thing"}}
    response = server.post(path, {**chat_with(None, A_SCHEMA)[1], "response_format": tag})
    check_error(response, 400, "response_format")
    assert response.json()["error"]["message"].startswith("response_format holds")
    # Nor do the readers of requests put their own words in: which kinds a field may be.
    response = server.post(CHAT, {"messages": USER, "stop": [None]})
    assert response.json()["error"]["message"].startswith("stop: ")
    assert "[_" not in response.text


def test_a_response_in_the_background_says_whose_fault_it_was(server: ServerProcess) -> None:
    path, body = response_with(None, NO_SCHEMA)
    made = server.post(path, {**body, "tool_choice": "required", "background": True}).json()
    deadline = time.monotonic() + 60
    while (told := server.get(f"{path}/{made['id']}").json())["status"] != "failed":
        assert time.monotonic() < deadline, told
    assert (told["error"]["code"], told["error"]["param"]) == ("invalid_prompt", "tools")


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "none"}, {"tool_choice": "auto"}])
def test_an_empty_list_of_tools_is_none(server: ServerProcess, choice: Any) -> None:
    chat = server.post(CHAT, {"messages": USER, "max_tokens": 1, "tools": [], **choice})
    response = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 1, "tools": []})
    assert (chat.status_code, response.status_code) == (200, 200)
    without = server.post(CHAT, {"messages": USER, "max_tokens": 1, "functions": []})
    assert without.json()["usage"] == chat.json()["usage"]


def test_it_still_serves(server: ServerProcess) -> None:
    response = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, "ignore_eos": True})
    assert response.status_code == 200
    assert json.loads(response.text)["usage"]["completion_tokens"] == 2
    assert "Traceback" not in server.log
