"""DeepSeek-V3.2's prompts, where they differ from DeepSeek-V4's."""

from typing import Any

import pytest

from vllm.exceptions import UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.chat_encoder import check_chat_flags, find_templates, make_chat_encoder
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.deepseek_v32_encoding import DeepseekV32ChatEncoder

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"
THINK = {"thinking": True}
RULES = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!", "reasoning": "greet"}
BYE = {"role": "user", "content": "Bye"}
FIND = {"name": "find", "parameters": {"type": "object"}}
TOOLS = parse_tools([{"type": "function", "function": FIND}])
CONFIG = {"model_type": "deepseek_v32"}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = {
    "role": "assistant",
    "content": "",
    "reasoning": "look",
    "tool_calls": [call("find", '{"text": "a", "limit": 5}'), call("now", "{}")],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "now", "content": "12:00"},
    {"role": "tool", "tool_call_id": "find", "content": "b"},
]
CALLS_TEXT = (
    f'\n\n<{D}function_calls>\n<{D}invoke name="find">\n'
    f'<{D}parameter name="text" string="true">a</{D}parameter>\n'
    f'<{D}parameter name="limit" string="false">5</{D}parameter>\n'
    f'</{D}invoke>\n<{D}invoke name="now">\n</{D}invoke>\n</{D}function_calls>{E}'
)
RESULTS_TEXT = (
    "\n\n<function_results>\n<result>b</result>\n<result>12:00</result>\n</function_results>"
)


def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


@pytest.fixture(scope="module")
def encoder() -> Any:
    return make_chat_encoder(CONFIG, tokenizer())


def text(encoder: DeepseekV32ChatEncoder, messages: list[Any], **options: Any) -> str:
    return encoder.encode_chat(messages, ChatOptions(**options)).text


@pytest.mark.parametrize(
    ("messages", "thinking", "chat"),
    [
        ([RULES, HI], f"{B}Be brief.{U}Hi{A}<think>", f"{B}Be brief.{U}Hi{A}</think>"),
        ([HI, BYE], f"{B}{U}Hi{U}Bye{A}<think>", f"{B}{U}Hi{U}Bye{A}</think>"),
        (
            [HI, HELLO, BYE],
            f"{B}{U}Hi{A}</think>Hello!{E}{U}Bye{A}<think>",
            f"{B}{U}Hi{A}</think>Hello!{E}{U}Bye{A}</think>",
        ),
        (
            [HI, CALLS, *RESULTS],
            f"{B}{U}Hi{A}<think>look</think>{CALLS_TEXT}{RESULTS_TEXT}\n\n<think>",
            f"{B}{U}Hi{A}</think>{CALLS_TEXT}{RESULTS_TEXT}\n\n</think>",
        ),
        (
            [HI, CALLS, *RESULTS, HELLO, BYE],
            f"{B}{U}Hi{A}</think>{CALLS_TEXT}{RESULTS_TEXT}\n\n</think>Hello!{E}{U}Bye{A}<think>",
            f"{B}{U}Hi{A}</think>{CALLS_TEXT}{RESULTS_TEXT}\n\n</think>Hello!{E}{U}Bye{A}</think>",
        ),
        (
            [HI, CALLS, *RESULTS, BYE],
            f"{B}{U}Hi{A}</think>{CALLS_TEXT}{RESULTS_TEXT}{U}Bye{A}<think>",
            f"{B}{U}Hi{A}</think>{CALLS_TEXT}{RESULTS_TEXT}{U}Bye{A}</think>",
        ),
    ],
)
def test_layout(encoder: Any, messages: list[Any], thinking: str, chat: str) -> None:
    assert text(encoder, messages, template_kwargs=THINK) == thinking
    # It thinks where it is asked to.
    assert text(encoder, messages) == chat


def test_tools_stand_behind_the_system_text(encoder: Any) -> None:
    prompt = text(encoder, [RULES, HI, HELLO, BYE], tools=TOOLS, template_kwargs=THINK)
    assert prompt.startswith(f"{B}Be brief.\n\n## Tools")
    assert f"<{D}function_calls>" in prompt
    assert "Results come in <function_results>." in prompt
    # With tools too.
    assert prompt.endswith(f"{U}Hi{A}</think>Hello!{E}{U}Bye{A}<think>")


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"reasoning_effort": "high"}, "<think>"),
        ({"reasoning_effort": "none", "template_kwargs": THINK}, "</think>"),
        ({"template_kwargs": {"enable_thinking": True}}, "<think>"),
        ({"template_kwargs": {"thinking": False}, "reasoning_effort": "low"}, "</think>"),
    ],
)
def test_when_it_thinks(encoder: Any, options: dict[str, Any], end: str) -> None:
    prompt = encoder.encode_chat([HI], ChatOptions(**options))
    assert prompt.text == f"{B}{U}Hi{A}{end}"
    assert prompt.in_reasoning == (end == "<think>")


@pytest.mark.parametrize(
    ("final", "tail", "in_reasoning"),
    [
        ({"content": "Hel", "reasoning": "greet"}, "<think>greet</think>Hel", False),
        ({"content": "", "reasoning": "gre"}, "<think>gre", True),
    ],
)
def test_a_final_message_goes_on(
    encoder: Any, final: dict[str, str], tail: str, in_reasoning: bool
) -> None:
    options = ChatOptions(
        continue_final_message=True, add_generation_prompt=False, template_kwargs=THINK
    )
    prompt = encoder.encode_chat([HI, {"role": "assistant"} | final], options)
    assert prompt.text == f"{B}{U}Hi{A}{tail}"
    assert prompt.in_reasoning == in_reasoning


def test_unknown_arguments_are_named(encoder: Any) -> None:
    with pytest.raises(UserInputError, match=r"'depth', which DeepSeek-V3\.2"):
        text(encoder, [HI], template_kwargs={"depth": 1})
    # A template beside the checkpoint may know it.
    check_chat_flags(CONFIG, None, {"depth": 1})


def test_a_template_beside_the_checkpoint_comes_first() -> None:
    own = tokenizer()
    assert find_templates(CONFIG, own) is None
    found = find_templates(CONFIG, Tokenizer(own.backend, {"chat_template": "{{ messages }}"}))
    assert found is not None
    assert found.default == "{{ messages }}"
