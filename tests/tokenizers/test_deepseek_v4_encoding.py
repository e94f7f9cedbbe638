import itertools
import re

import pytest
import tokenizers
from tokenizers import models

from vllm.exceptions import ConfigError, UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.deepseek_v4_encoding import DeepseekV4ChatEncoder, render

B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CHAT = {"thinking": False}

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!", "reasoning": "greet"}
BYE = {"role": "user", "content": "Bye"}


@pytest.fixture(scope="module")
def encoder() -> DeepseekV4ChatEncoder:
    return DeepseekV4ChatEncoder(Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path))


def text(encoder, messages, **options) -> str:
    return encoder.encode_chat(messages, ChatOptions(**options)).text


@pytest.mark.parametrize(
    ("messages", "thinking", "chat"),
    [
        ([HI], f"{B}{U}Hi{A}<think>", f"{B}{U}Hi{A}</think>"),
        ([SYSTEM, HI], f"{B}Be brief.{U}Hi{A}<think>", f"{B}Be brief.{U}Hi{A}</think>"),
        ([SYSTEM], f"{B}Be brief.{A}<think>", f"{B}Be brief.{A}</think>"),
        (
            [HI, HELLO, BYE],  # the old reasoning is dropped
            f"{B}{U}Hi{A}</think>Hello!{E}{U}Bye{A}<think>",
            f"{B}{U}Hi{A}</think>Hello!{E}{U}Bye{A}</think>",
        ),
        (
            [HI, HELLO],  # no user message follows: the reasoning stays
            f"{B}{U}Hi{A}<think>greet</think>Hello!{E}{A}<think>",
            f"{B}{U}Hi{A}</think>Hello!{E}{A}</think>",
        ),
        ([HI, BYE], f"{B}{U}Hi\n\nBye{A}<think>", f"{B}{U}Hi\n\nBye{A}</think>"),
        (
            [HI, SYSTEM, BYE],
            f"{B}{U}HiBe brief.{U}Bye{A}<think>",
            f"{B}{U}HiBe brief.{U}Bye{A}</think>",
        ),
    ],
)
def test_layout(encoder, messages, thinking, chat):
    assert text(encoder, messages) == thinking
    assert text(encoder, messages, template_kwargs=CHAT) == chat


def test_without_a_generation_prompt(encoder):
    prompt = encoder.encode_chat([HI, HELLO], ChatOptions(add_generation_prompt=False))
    assert prompt.text == f"{B}{U}Hi{A}<think>greet</think>Hello!{E}"
    assert not prompt.in_reasoning


@pytest.mark.parametrize(
    ("final", "kwargs", "tail", "in_reasoning"),
    [
        ({"content": "Hel", "reasoning": "greet"}, {}, "<think>greet</think>Hel", False),
        ({"content": "Hel"}, {}, "<think></think>Hel", False),
        ({"content": "", "reasoning": "gre"}, {}, "<think>gre", True),
        ({"content": None, "reasoning": "gre"}, {}, "<think>gre", True),
        ({"content": "Hel", "reasoning": "greet"}, CHAT, "</think>Hel", False),
        ({"content": ""}, CHAT, "</think>", False),
        ({"content": "<think>odd", "reasoning": "r"}, {}, "<think>r</think><think>odd", False),
    ],
)
def test_continued_final_message(encoder, final, kwargs, tail, in_reasoning):
    options = ChatOptions(
        continue_final_message=True, add_generation_prompt=False, template_kwargs=kwargs
    )
    prompt = encoder.encode_chat([HI, {"role": "assistant"} | final], options)
    assert prompt.text == f"{B}{U}Hi{A}{tail}"
    assert prompt.in_reasoning == in_reasoning


@pytest.mark.parametrize(
    ("options", "thinking"),
    [
        ({}, True),
        ({"template_kwargs": {"thinking": True}}, True),
        ({"template_kwargs": {"enable_thinking": True}}, True),
        ({"template_kwargs": {"thinking": None}}, True),
        ({"template_kwargs": {"thinking": False}}, False),
        ({"template_kwargs": {"enable_thinking": False}}, False),
        ({"template_kwargs": {"thinking": True, "enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none", "template_kwargs": {"thinking": True}}, False),
        ({"template_kwargs": {"reasoning_effort": "none"}}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "medium"}, True),
        ({"reasoning_effort": "low", "template_kwargs": {"thinking": False}}, False),
    ],
)
def test_thinking_switches(encoder, options, thinking):
    prompt = encoder.encode_chat([HI], ChatOptions(**options))
    assert prompt.in_reasoning == thinking
    assert prompt.text == f"{B}{U}Hi{A}" + ("<think>" if thinking else "</think>")


@pytest.mark.parametrize("effort", ["high", "xhigh", "max"])
def test_more_effort_is_asked_for_before_the_first_message(encoder, effort):
    shown = {text(encoder, [SYSTEM, HI], reasoning_effort=effort)}
    shown.add(text(encoder, [SYSTEM, HI], template_kwargs={"reasoning_effort": effort}))
    (prompt,) = shown
    prefix = {"max": "Reasoning effort: maximum."}.get(effort, "Reasoning effort: high.")
    assert prompt.startswith(B + prefix)
    assert prompt.endswith(f"Be brief.{U}Hi{A}<think>")
    chat = text(encoder, [SYSTEM, HI], reasoning_effort=effort, template_kwargs=CHAT)
    assert chat == f"{B}Be brief.{U}Hi{A}</think>"  # without thinking there is nothing to deepen


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({"thinking": "yes"}, "thinking='yes' must be true or false"),
        ({"enable_thinking": 0}, "enable_thinking=0"),
        ({"add_generation": True}, "'add_generation'"),
        ({"reasoning_effort": "huge"}, "'huge' is unknown"),
        ({"reasoning_effort": 3}, "3 is unknown"),
    ],
)
def test_bad_template_arguments(encoder, kwargs, shown):
    with pytest.raises(UserInputError, match=re.escape(shown)):
        text(encoder, [HI], template_kwargs=kwargs)


def test_tokens(encoder):
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    prompt = encoder.encode_chat([SYSTEM, HI], ChatOptions())
    ids = prompt.token_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    marks = [tokenizer.special_token_id(mark) for mark in (U, A, "<think>")]
    assert [i for i in ids if i in marks] == marks
    assert ids[-2:] == marks[1:]
    assert tokenizer.decode(ids) == prompt.text
    twice = encoder.encode_chat([SYSTEM, HI], ChatOptions(add_special_tokens=True))
    assert twice.token_ids == [tokenizer.bos_token_id, *ids]


def test_a_foreign_tokenizer_is_refused():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.add_special_tokens([B, E, U, A, "<think>"])
    with pytest.raises(ConfigError, match="</think>"):
        DeepseekV4ChatEncoder(Tokenizer(backend))


def turns(roles) -> list[ChatMessage]:
    return [
        ChatMessage(r, f"c{i}", f"r{i}" if r == "assistant" else "") for i, r in enumerate(roles)
    ]


@pytest.mark.parametrize("thinking", [True, False])
def test_every_short_chat_keeps_its_parts_in_order(thinking):
    """Rules that hold for any sequence of roles, up to four messages."""
    roles = ("system", "user", "assistant")
    for length in range(1, 5):
        for chat in itertools.product(roles, repeat=length):
            rendered = render(turns(chat), thinking=thinking)
            assert re.findall(r"c\d", rendered) == [f"c{i}" for i in range(length)]
            assert rendered.startswith(B)
            assert rendered.count(B) == 1
            assert rendered.count(E) == chat.count("assistant")
            assert rendered.count(A) == chat.count("assistant") + 1
            assert rendered.count("</think>") == chat.count("assistant") + (not thinking)
            last_user = max((i for i, r in enumerate(chat) if r == "user"), default=-1)
            kept = [f"r{i}" for i, r in enumerate(chat) if r == "assistant" and i > last_user]
            assert re.findall(r"r\d", rendered) == (kept if thinking else [])
            runs = sum(role == "user" for role, _ in itertools.groupby(chat))
            assert rendered.count(U) == runs


def test_dropping_old_reasoning_keeps_the_prefix_of_the_next_turn_stable():
    """A chat's next prompt extends the last one's text up to the answer: what a cache reuses."""
    first = render(turns(["system", "user"]), thinking=False)
    second = render(turns(["system", "user", "assistant", "user"]), thinking=False)
    assert second.startswith(first)


def test_parts_end_where_the_next_turn_opens(encoder):
    messages = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    prompt = encoder.encode_chat(messages, ChatOptions())
    shorter = [encoder.encode_chat(messages[:n], ChatOptions()).token_ids for n in (2, 4)]
    system_end, user_end, *latest_first = prompt.part_ends
    assert system_end < user_end
    # Another first question shares the system prompt, and nothing more.
    other = [messages[0], {"role": "user", "content": "Other"}]
    other_ids = encoder.encode_chat(other, ChatOptions()).token_ids
    assert other_ids[:system_end] == prompt.token_ids[:system_end]
    assert other_ids[: system_end + 3] != prompt.token_ids[: system_end + 3]
    assert shorter[0][:user_end] == prompt.token_ids[:user_end]
    assert latest_first == sorted(latest_first, reverse=True)
    assert len(latest_first) == 2


def test_a_long_chat_tells_its_first_and_its_last_ends(encoder):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 40
    prompt = encoder.encode_chat(messages[:-1], ChatOptions())
    assert len(prompt.part_ends) == 16
    first, second, *rest = prompt.part_ends
    assert first < second < rest[-1] < rest[0] < len(prompt.token_ids)
