"""DeepSeek-V4's prompts with tools; see test_deepseek_v4_encoding for those without."""

import json

import pytest

from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.deepseek_v4_encoding import DeepseekV4ChatEncoder

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"
FIND = {"name": "find", "description": "Suche ü", "parameters": {"type": "object"}}
TOOLS = parse_tools([{"type": "function", "function": FIND}])
SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}


def call(call_id: str, arguments: str, name: str = "find") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str | None, content: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.fixture(scope="module")
def encoder() -> DeepseekV4ChatEncoder:
    return DeepseekV4ChatEncoder(Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path))


def render(encoder, messages, tools=(), **options) -> str:
    return encoder.encode_chat(messages, ChatOptions(tools=tools, **options)).text


def test_tools_stand_behind_the_system_text_one_function_a_line(encoder):
    section = render(encoder, [SYSTEM, HI], TOOLS)
    assert section.startswith(f"{B}Be brief.\n\n## Tools\n\n")
    assert section.endswith("\n\n" + json.dumps(FIND, ensure_ascii=False) + f"{U}Hi{A}<think>")
    assert f"<{D}tool_calls>\n<{D}invoke name=" in section
    without_system = render(encoder, [HI], TOOLS)
    assert without_system == section.replace("Be brief.", "")


def test_calls_and_results(encoder):
    arguments = '{"text": "a \\"b\\"\\n", "limit":5, "tags": ["x",  "y"], "deep": {"k": "v"}}'
    messages = [
        HI,
        {"role": "assistant", "content": "Wait.", "reasoning": "look", "tool_calls": [
            call("c1", arguments), call("c2", "{}", "list")
        ]},
        result("c2", "second"),
        result("c1", "first"),
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    block = (
        f'\n\n<{D}tool_calls>\n<{D}invoke name="find">\n'
        f'<{D}parameter name="text" string="true">a "b"\n</{D}parameter>\n'
        f'<{D}parameter name="limit" string="false">5</{D}parameter>\n'
        f'<{D}parameter name="tags" string="false">["x",  "y"]</{D}parameter>\n'
        f'<{D}parameter name="deep" string="false">{{"k": "v"}}</{D}parameter>\n'
        f'</{D}invoke>\n<{D}invoke name="list">\n</{D}invoke>\n</{D}tool_calls>'
    )
    turn = f"{U}<tool_result>first</tool_result>\n\n<tool_result>second</tool_result>\n\nAnd?"
    shown = render(encoder, messages, TOOLS)
    assert shown.endswith(f"{U}Hi{A}<think>look</think>Wait.{block}{E}{turn}{A}<think>")
    # Old reasoning stays wherever calls were made, also when the tools are left out.
    assert render(encoder, messages) == f"{B}" + shown[shown.index(f"{U}Hi") :]
    chat = render(encoder, messages, TOOLS, template_kwargs={"thinking": False})
    assert chat.endswith(f"{A}</think>Wait.{block}{E}{turn}{A}</think>")


def test_a_result_without_a_known_call_comes_last(encoder):
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "{}")]},
        result(None, "stray"),
        result("c1", "known"),
    ]
    shown = render(encoder, messages, TOOLS)
    assert shown.index("known") < shown.index("stray")


def test_an_agents_next_prompt_extends_the_last_one(encoder):
    """Reasoning stays in a chat with tools, so nothing in front of the answer changes."""
    messages: list[dict] = [SYSTEM, HI]
    last = render(encoder, messages, TOOLS)
    for turn in range(3):
        said = f"r{turn}</think>c{turn}"
        messages.append(
            {"role": "assistant", "reasoning": f"r{turn}", "content": f"c{turn}",
             "tool_calls": [call(f"id{turn}", '{"text": "x"}')]}
        )  # fmt: skip
        messages.append(result(f"id{turn}", "found"))
        prompt = render(encoder, messages, TOOLS)
        assert prompt.startswith(last + said)
        last = prompt


def test_the_developer_is_the_system(encoder):
    assert render(encoder, [SYSTEM | {"role": "developer"}, HI], TOOLS) == render(
        encoder, [SYSTEM, HI], TOOLS
    )
