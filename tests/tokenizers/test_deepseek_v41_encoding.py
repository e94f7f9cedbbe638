"""DeepSeek-V4.1's prompts, where they differ from DeepSeek-V4's."""

import re
from typing import Any

import pytest
import tokenizers

from vllm.exceptions import ConfigError, UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.chat_encoder import check_chat_flags, make_chat_encoder
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.deepseek_v41_encoding import SYSTEM, DeepseekV41ChatEncoder

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
D = "｜DSML｜"
CHAT = {"thinking": False}
RULES = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!", "reasoning": "greet"}
BYE = {"role": "user", "content": "Bye"}
FIND = {"name": "find", "parameters": {"type": "object"}}
TOOLS = parse_tools([{"type": "function", "function": FIND}])
CONFIG = {"model_type": "deepseek_v41"}


def asked(number: int) -> str:
    return (
        f"{SYSTEM}Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough "
        "the reasoning)\n\n"
    )


def v4_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


@pytest.fixture(scope="module")
def encoder() -> Any:
    own = v4_tokenizer()
    backend = tokenizers.Tokenizer.from_str(own.backend.to_str())
    backend.add_special_tokens([SYSTEM])
    return make_chat_encoder(CONFIG, own.with_backend(backend))


def text(encoder: DeepseekV41ChatEncoder, messages: list[Any], **options: Any) -> str:
    return encoder.encode_chat(messages, ChatOptions(**options)).text


@pytest.mark.parametrize(
    ("messages", "thinking", "chat"),
    [
        ([HI], f"{B}{asked(75)}{U}Hi{A}<think>", f"{B}{U}Hi{A}</think>"),
        (
            [RULES, HI],
            f"{B}{asked(75)}Be brief.{U}Hi{A}<think>",
            f"{B}{SYSTEM}Be brief.{U}Hi{A}</think>",
        ),
        (
            [HI, HELLO, RULES],  # counts as a user's turn: the reasoning before it is dropped
            f"{B}{asked(75)}{U}Hi{A}</think>Hello!{E}{SYSTEM}Be brief.{A}<think>",
            f"{B}{U}Hi{A}</think>Hello!{E}{SYSTEM}Be brief.{A}</think>",
        ),
        (
            [HI, HELLO, {"role": "tool", "content": "stray"}],  # results do not
            f"{B}{asked(75)}{U}Hi{A}<think>greet</think>Hello!{E}"
            f"{U}<tool_result>stray</tool_result>{A}<think>",
            f"{B}{U}Hi{A}</think>Hello!{E}{U}<tool_result>stray</tool_result>{A}</think>",
        ),
        (
            [HI, HELLO, BYE],
            f"{B}{asked(75)}{U}Hi{A}</think>Hello!{E}{U}Bye{A}<think>",
            f"{B}{U}Hi{A}</think>Hello!{E}{U}Bye{A}</think>",
        ),
    ],
)
def test_layout(encoder: Any, messages: list[Any], thinking: str, chat: str) -> None:
    assert text(encoder, messages) == thinking
    assert text(encoder, messages, template_kwargs=CHAT) == chat


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        *[("low", 50), ("medium", 50), ("minimal", 50), ("high", 75), ("xhigh", 75), ("max", 100)],
        *[("1", 1), ("30", 30), ("100", 100)],
    ],
)
def test_efforts(encoder: Any, effort: str, number: int) -> None:
    assert text(encoder, [HI], reasoning_effort=effort).startswith(B + asked(number))
    kwargs = {"reasoning_effort": int(effort) if effort.isdigit() else effort}
    assert text(encoder, [HI], template_kwargs=kwargs).startswith(B + asked(number))
    # Without thinking there is nothing to deepen.
    chat = text(encoder, [HI], reasoning_effort=effort, template_kwargs=CHAT)
    assert chat == f"{B}{U}Hi{A}</think>"


@pytest.mark.parametrize("effort", ["0", "101", "1000", "-5", "7.5", "huge", "", "²"])
def test_bad_efforts(encoder: Any, effort: str) -> None:
    with pytest.raises(UserInputError, match="or a number from 1 to 100"):
        text(encoder, [HI], reasoning_effort=effort)


@pytest.mark.parametrize("effort", [0, 101, 3.5, True, [5]])
def test_bad_efforts_of_templates(encoder: Any, effort: Any) -> None:
    with pytest.raises(UserInputError, match=re.escape(f"reasoning_effort={effort!r} is unknown")):
        text(encoder, [HI], template_kwargs={"reasoning_effort": effort})
    with pytest.raises(ConfigError, match="reasoning_effort"):
        check_chat_flags(CONFIG, None, {"reasoning_effort": effort})


def test_none_turns_thinking_off(encoder: Any) -> None:
    assert text(encoder, [HI], reasoning_effort="none") == f"{B}{U}Hi{A}</think>"


def test_parts_are_joined_by_a_blank_line(encoder: Any) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    assert text(encoder, [parts], template_kwargs=CHAT) == f"{B}{U}a\n\nb{A}</think>"


def test_tools_and_calls_have_a_space(encoder: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"k": "v"}'}}
    raw = {"id": "d", "type": "function", "function": {"name": "find", "arguments": "[1"}}
    messages = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call, raw]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    shown = text(encoder, messages, tools=TOOLS, template_kwargs=CHAT)
    assert f"<{D}tool" not in shown
    assert f'<{D} calls>\n<{D} invoke name="FUNCTION">' in shown
    assert (
        f'\n\n<{D} calls>\n<{D} invoke name="find">\n<{D} parameter name="k" string="true">v'
        f'</{D} parameter>\n</{D} invoke>\n<{D} invoke name="find">\n'
        f'<{D} parameter name="arguments" string="true">[1</{D} parameter>\n</{D} invoke>\n'
        f"</{D} calls>{E}"
    ) in shown


def test_a_tokenizer_without_the_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="System"):
        make_chat_encoder(CONFIG, v4_tokenizer())
