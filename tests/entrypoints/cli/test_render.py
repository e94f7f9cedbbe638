"""``vllm render``."""

import io
import json
from typing import Any

import pytest

from vllm.entrypoints.cli.chat_bodies import read_chat
from vllm.entrypoints.cli.main import main

LINE = "x-anthropic-billing-header: cc_version=2.1.332.1ab; cc_entrypoint=cli; cch=a1b2c;\n"
HI = {"role": "user", "content": "hi"}
MARK = {"type": "ephemeral", "ttl": "1h"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
BY_TURNS = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}"
    "{% elif not loop.first %}{{ raise_exception('one') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(body: Any, *flags: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(body)))
        code = main(["render", "--model", "deepseek-v4", *flags])
        printed = capsys.readouterr()
        return code, printed.out or printed.err

    return run


def test_the_prompt_is_shown_with_its_places(render: Any) -> None:
    system = [{"type": "text", "text": LINE + "Be brief.", "cache_control": MARK}]
    code, text = render({"system": system, "messages": [HI, HI], "max_tokens": 3})
    assert code == 0
    assert "left out  the billing line of the first system text" in text
    assert "Be brief." in text
    assert "marked by the client, kept for 3600 s" in text
    assert "shown by the chat format" in text
    assert "joined" not in text


def test_joined_messages_are_named(render: Any) -> None:
    body = {"messages": [{"role": "system", "content": "Be brief."}, HI, HI]}
    code, text = render(body, "--chat-template", BY_TURNS)
    assert code == 0
    assert "joined    messages 0, 1, 2 (the first is 0)" in text
    assert "[Be brief.\n\nhi\n\nhi]" in text


def test_json_says_the_same(render: Any) -> None:
    body = {"messages": [{"role": "system", "content": LINE + "Be brief."}, HI]}
    shown = json.loads(render(body, "--json")[1])
    assert shown["left_out_billing_line"] is True
    assert "billing" not in shown["prompt"]
    assert {place["by"] for place in shown["breakpoints"]} == {"format"}
    kept = json.loads(render(body, "--json", "--keep-billing-line")[1])
    assert kept["left_out_billing_line"] is False
    assert LINE in kept["prompt"]
    assert kept["num_tokens"] > shown["num_tokens"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [HI], "tools": [{"type": "function", "function": {"name": "look"}}]},
        {"messages": [HI], "system": "", "tools": [TOOL]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"input": "hi", "tools": [{"type": "function", "name": "look"}]},
        {"input": [HI], "instructions": "Be brief."},
        {"messages": [HI, {"role": "assistant", "content": "I"}], "system": "Be brief."},
    ],
)
def test_bodies_of_every_api_are_read(body: dict[str, Any]) -> None:
    chat = read_chat(body)
    assert any("hi" in str(message["content"]) for message in chat.messages)
    assert [tool.name for tool in chat.options.tools] == ["look"] * ("tools" in body)
    assert chat.options.continue_final_message == (chat.messages[-1]["role"] == "assistant")


@pytest.mark.parametrize(
    ("body", "word"),
    [([], "must be a JSON object"), ({}, "no messages"), ({"messages": [{}]}, "role=None")],
)
def test_a_wrong_body_is_told(render: Any, body: Any, word: str) -> None:
    code, text = render(body)
    assert code == 2
    assert word in text
