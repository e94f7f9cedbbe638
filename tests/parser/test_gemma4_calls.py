"""Gemma 4's calls with odd texts: what the grammar takes, parsers read and prompts show again."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken

from tests.parser.reading import pieces_of, read, told_calls
from tests.tokenizers.family_tokenizers import byte_level
from tests.tokenizers.gemma4_conversations import MARKS
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.registry import ParserChoice
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import ChatOptions, Tokenizer, make_chat_encoder
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.gemma4_tools import spell_call
from vllm.tokenizers.tool_calls import MessageCall
from vllm.v1.structured_output.backend import Backend

CHOICE = ParserChoice("gemma4", "gemma4")
# In another order than prompts have.
SCHEMA = {
    "type": "object",
    "required": ["text"],
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "Tags": {"type": "array", "items": {"type": "string"}},
        "inner": {"type": "object", "properties": {"note": {"type": "string"}}},
    },
}
TOOLS = parse_tools(
    [
        {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
# Everything but the special tokens of the format, which no text can hold as such.
ODD = st.text(
    alphabet=st.sampled_from(list("a\"'\\\n\t\r{}[]:,<>|\u00e9\u6f22\U0001f98a\u2028\x00 1"))
    | st.characters(exclude_categories=["Cs"]),
    max_size=24,
).filter(lambda text: not any(mark in text for mark in MARKS))
ARGUMENTS = st.fixed_dictionaries(
    {"text": ODD},
    optional={
        "n": st.integers(-(10**9), 10**9),
        "Tags": st.lists(ODD, min_size=1, max_size=3),
        "inner": st.fixed_dictionaries({"note": ODD}),
    },
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_level().backend
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return Tokenizer(backend, {"bos_token": "<bos>", "eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def matchers(tokenizer: Tokenizer) -> dict[str, LLMatcher]:
    """Of ``required``, and of the named function."""
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    backend = Backend(tokenizer, tokenizer.vocab_size, frozenset([end]))
    tools = {"required": TOOLS, "named": TOOLS[:1]}
    return {
        name: backend.check(
            StructuredOutputsParams(
                structural_tag=answer_tag("gemma4", AnswerGrammar(own, one_call=True))
            )
        )
        for name, own in tools.items()
    }


@settings(max_examples=60, derandomize=True, deadline=None)
@given(arguments=ARGUMENTS, at=st.integers(0, 60))
@example(arguments={"text": 'say "hi"\n{a:1}, [<b>] \\n'}, at=3)
@example(arguments={"text": "", "Tags": ["", ",", "]"], "inner": {"note": "}"}}, at=9)
def test_odd_texts_are_taken_read_and_shown_again(
    tokenizer: Tokenizer, matchers: dict[str, LLMatcher], arguments: dict[str, Any], at: int
) -> None:
    call = MessageCall("a", "find", json.dumps(arguments))
    spelled = spell_call(call)
    token_ids = tokenizer.encode(spelled, False)
    for matcher in matchers.values():
        matcher.reset()
        assert matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert matcher.is_accepting()
    for parts in ([spelled], [spelled[:at], spelled[at:]]):
        ((name, told, is_whole),) = told_calls(pieces_of(CHOICE, parts, tools=TOOLS))
        assert (name, is_whole) == ("find", True)
        assert json.loads(told) == arguments
    # The next prompt of an agent shows the call in the tokens that it was made of.
    encoder = make_chat_encoder({"model_type": "gemma4"}, tokenizer)
    sent = {"id": "a", "type": "function", "function": {"name": "find", "arguments": told}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [sent]}]
    shown = encoder.encode_chat(messages, ChatOptions()).token_ids
    begin = shown.index(token_ids[0])
    assert shown[begin : begin + len(token_ids)] == token_ids


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>call:find{n:1}<tool_call|>",
        '<|tool_call>call:find{text:"x"}<tool_call|>',
        '<|tool_call>call:find{text:<|"|>x<|"|>,n:1}<tool_call|>',
        '<|tool_call>call:find{n:1.5,text:<|"|>x<|"|>}<tool_call|>',
        '<|tool_call>call:find{text:<|"|>x<|"|>}<tool_call|>So.',
        '{"name": "find", "arguments": {"text": "x"}}',
    ],
)
def test_what_is_no_call_of_the_format_is_not_taken(
    tokenizer: Tokenizer, matchers: dict[str, LLMatcher], text: str
) -> None:
    token_ids = tokenizer.encode(text, False)
    for matcher in matchers.values():
        matcher.reset()
        taken = matcher.try_consume_tokens(token_ids)
        assert taken < len(token_ids) or not matcher.is_accepting()


def test_a_text_that_spells_marks_ends_at_them() -> None:
    # As special tokens they are the format's: nothing behind them is the text's.
    text = '<|tool_call>call:find{text:<|"|>a<tool_call|>b<|"|>}'
    assert read(CHOICE, text, tools=TOOLS).tool_calls == []
