"""Whatever roles follow each other, every text stands in the prompt, in every kind of template."""

import itertools
from typing import Any

import pytest

from tests.tokenizers.family_tokenizers import byte_level
from tests.tokenizers.order_templates import ANYTHING, NO_SYSTEM, ORDERS
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_messages import ChatMessage, parse_messages
from vllm.tokenizers.chat_template import JinjaChatEncoder
from vllm.tokenizers.fitted_messages import fit_messages, put_results_first
from vllm.tokenizers.template_traits import TemplateTraits

ROLES = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
# Chats that agents send; C is a call, T its result.
CHATS = [
    *("SU", "SSU", "SSSU", "SUS", "SSUSAU", "SUSAUAU", "SUAS", "SUASU", "SUASSAU", "SUSSAU"),
    *("US", "UAS", "UASU", "UASAU", "UU", "UUAU", "UAAU", "SUUAAU", "S", "SS", "SSUASSUU"),
    *("UCTA", "SUCTAU", "UCTU", "UCTTU", "UCTS", "SUCTSAU", "UCUT", "UCTUAU", "SSUCTUSAUU"),
    *("UACTAU", "UCTCTAU", "SUCTCTUAU"),
]


def make_chat(shape: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i, letter in enumerate(shape):
        text = f"text{i:02}"
        if letter == "C":
            call = {"name": "f", "arguments": "{}"}
            calls = [{"id": "call00001", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            continue
        messages.append({"role": ROLES[letter], "content": text})
        if letter == "T":
            messages[-1]["tool_call_id"] = "call00001"
    return messages


@pytest.mark.parametrize("name", list(ORDERS))
def test_every_text_stands_in_the_prompt(name: str) -> None:
    encoder = JinjaChatEncoder(byte_level(), ORDERS[name])
    for shape in CHATS:
        messages = make_chat(shape)
        prompt = encoder.encode_chat(messages, ChatOptions())
        missing = [
            m["content"] for m in messages if m["content"] and m["content"] not in prompt.text
        ]
        assert not missing, (shape, prompt.text)


def test_a_template_that_takes_all_gets_all_as_it_is() -> None:
    encoder = JinjaChatEncoder(byte_level(), ANYTHING)
    for shape in CHATS:
        prompt = encoder.encode_chat(make_chat(shape), ChatOptions())
        assert prompt.joined == ()
        assert prompt.text.count("<|im_start|>") == len(shape) + 1


@pytest.mark.parametrize(
    ("shape", "text", "joined"),
    [
        ("SSU", "[Q]text00\n\ntext01\n\ntext02[/Q]", ((0, 1, 2),)),
        ("SUSAU", "[Q]text00\n\ntext01\n\ntext02[/Q]text03[/A][Q]text04[/Q]", ((0, 1, 2),)),
        ("UASU", "[Q]text00[/Q]text01[/A][Q]text02\n\ntext03[/Q]", ((2, 3),)),
        ("UAS", "[Q]text00[/Q]text01[/A][Q]text02[/Q]", ()),
        ("UCTU", "[Q]text00[/Q][C]{}[/C][R]text02\n\ntext03[/R]", ((2, 3),)),
        ("UCUT", "[Q]text00[/Q][C]{}[/C][R]text03\n\ntext02[/R]", ((3, 2),)),
        ("UUAA", "[Q]text00\n\ntext01[/Q]text02\n\ntext03[/A]", ((0, 1), (2, 3))),
    ],
)
def test_joined_texts_stand_in_their_order(shape: str, text: str, joined: object) -> None:
    encoder = JinjaChatEncoder(byte_level(), NO_SYSTEM)
    prompt = encoder.encode_chat(make_chat(shape), ChatOptions(add_generation_prompt=False))
    assert (prompt.text, prompt.joined) == (text, joined)


@pytest.mark.parametrize("name", list(ORDERS))
def test_what_a_conversation_was_is_the_beginning_of_what_it_becomes(name: str) -> None:
    """A late system text does not move when turns follow, which the prefix cache lives by."""
    if name in ("in question", "shows last"):
        return  # such a template moves texts itself
    encoder = JinjaChatEncoder(byte_level(), ORDERS[name])
    options = ChatOptions(add_generation_prompt=False)
    for before, after in itertools.pairwise(["SUS", "SUSA", "SUSAU", "SUSAUA"]):
        one, two = (encoder.encode_chat(make_chat(s), options).text for s in (before, after))
        assert two.startswith(one), (before, after)


def test_messages_that_cannot_be_apart_keep_calls_and_reasoning() -> None:
    messages = [
        ChatMessage("user", "q"),
        ChatMessage("assistant", "a", reasoning="r"),
        ChatMessage("assistant", "", reasoning="s", parts=("",)),
    ]
    fitted = fit_messages(list(enumerate(messages)), TemplateTraits())
    assert [placed.places for placed in fitted] == [(0,), (1, 2)]
    assert fitted[1].message == ChatMessage("assistant", "a", reasoning="r\n\ns")


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ("UCTU", [0, 1, 2, 3]),
        ("UCUT", [0, 1, 3, 2]),
        ("UCUTUTA", [0, 1, 3, 5, 2, 4, 6]),
        ("UCUATU", [0, 1, 2, 3, 4, 5]),
        ("UUSU", [0, 1, 2, 3]),
        ("CUSUT", [0, 1, 2, 3, 4]),
        ("CUCUT", [0, 1, 2, 4, 3]),
    ],
)
def test_results_stand_behind_their_calls(shape: str, order: list[int]) -> None:
    assert put_results_first(parse_messages(make_chat(shape))) == order


def test_parts_stay_parts_where_nothing_is_joined() -> None:
    message = ChatMessage("user", "a\nb", parts=("a", "b"))
    (placed,) = fit_messages([(0, message)], TemplateTraits())
    assert placed.message is message
