"""Forced calls end behind one that is there already, in every format that allows several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.structured_output.conftest import EOS, VOCAB, Reader
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.chat_tools import parse_tools
from vllm.v1.structured_output.backend import Backend
from vllm.v1.structured_output.grammar import Grammar
from vllm.v1.structured_output.masks import MaskWork
from vllm.v1.structured_output.structural_tag import MAX_CALLS

_ARGUMENTS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "t": {"type": "string"}},
    "required": ["n"],
}
_TOOLS = parse_tools(
    [
        {"type": "function", "function": {"name": name, "parameters": _ARGUMENTS}}
        for name in ("find", "now")
    ]
)
_D = "｜DSML｜"


def _dsml(name: str, n: int, _: int) -> str:
    return (
        f'<{_D}invoke name="{name}">\n<{_D}parameter name="n" string="false">{n}'
        f"</{_D}parameter>\n</{_D}invoke>\n"
    )


def _kimi(name: str, n: int, at: int) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>"
        f'{{"n": {n}}}<|tool_call_end|>'
    )


_KIMI = ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>")
_WRITTEN: dict[str, tuple[str, str, str, Callable[[str, int, int], str]]] = {
    "hermes": (
        *("", "\n", ""),
        lambda name, n, _: (
            f'<tool_call>\n{{"name": "{name}", "arguments": {{"n": {n}}}}}\n</tool_call>'
        ),
    ),
    "llama3_json": (
        *("", "; ", ""),
        lambda name, n, _: f'{{"name": "{name}", "parameters": {{"n": {n}}}}}',
    ),
    "glm": (
        *("", "\n", ""),
        lambda name, n, _: (
            f"<tool_call>{name}\n<arg_key>n</arg_key>\n<arg_value>{n}</arg_value>\n</tool_call>"
        ),
    ),
    "qwen3_coder": (
        *("", "\n", ""),
        lambda name, n, _: (
            f"<tool_call>\n<function={name}>\n<parameter=n>\n{n}\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
    ),
    "gemma4": ("", "", "", lambda name, n, _: f"<|tool_call>call:{name}{{n:{n}}}<tool_call|>"),
    "deepseek_v4": (f"\n\n<{_D}tool_calls>\n", "", f"</{_D}tool_calls>", _dsml),
    "kimi_k2": (*_KIMI, _kimi),
    "mistral": (
        *("[TOOL_CALLS][", ", ", "]"),
        lambda name, n, _: f'{{"name": "{name}", "arguments": {{"n": {n}}}}}',
    ),
    "mistral_v11": ("", "", "", lambda name, n, _: f'[TOOL_CALLS]{name}[ARGS]{{"n": {n}}}'),
    "pythonic": ("[", ", ", "]", lambda name, n, _: f"{name}(n={n})"),
}


# Marks of these formats are tokens of their releases' vocabularies.
_SPECIAL = {
    "kimi_k2": [
        *(_KIMI[0], _KIMI[2], "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "mistral": ["[TOOL_CALLS]"],
    "mistral_v11": ["[TOOL_CALLS]", "[ARGS]"],
    "deepseek_v4": ["｜DSML｜"],
    "hermes": ["<tool_call>", "</tool_call>"],
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokenizer: Tokenizer
    backend: Backend
    end_id: int


@pytest.fixture
def embedded(reader: Reader) -> _Vocabulary:
    return _Vocabulary(reader.tokenizer, reader.backend, EOS)


def _with_marks(dialect: str) -> _Vocabulary:
    """A vocabulary of bytes and a format's marks."""
    tokenizer = byte_level()
    tokenizer.backend.add_special_tokens(_SPECIAL[dialect])
    end_id = tokenizer.token_to_id("<|im_end|>")
    assert end_id is not None
    return _Vocabulary(tokenizer, Backend(tokenizer, VOCAB, frozenset([end_id])), end_id)


def _start(words: _Vocabulary, dialect: str, *, one_call: bool = False) -> Grammar:
    tag = answer_tag(dialect, AnswerGrammar(_TOOLS, one_call=one_call))
    made = words.backend.compile(StructuredOutputsParams(structural_tag=tag))
    return Grammar(made, frozenset([words.end_id]))


def _allowed(words: _Vocabulary, grammar: Grammar, drafts: Sequence[int] = ()) -> list[int]:
    """What may follow behind drafts."""
    bits = np.full((len(drafts) + 1, -(-VOCAB // 32)), -1, dtype=np.int32)
    words.backend.fill([MaskWork(grammar, 0, drafts)], bits)
    row = np.unpackbits(bits[-1:].view(np.uint8), axis=1, count=VOCAB, bitorder="little")[0]
    return np.flatnonzero(row).tolist()


def _insist(words: _Vocabulary, grammar: Grammar, wanted: str, limit: int = 600) -> str:
    """What a model says that wants a text, in the longest tokens that fit it, and else the end."""
    said = ""
    for _ in range(limit):
        texts = {
            words.tokenizer.decode([token_id], skip_special_tokens=False): token_id
            for token_id in _allowed(words, grammar)
        }
        if fits := [text for text in texts if text and wanted.startswith(said + text)]:
            taken = max(fits, key=len)
        elif words.end_id in texts.values():
            return said
        else:
            taken = max(texts, key=len)
        assert grammar.accept_tokens("q", [texts[taken]])
        said += taken
    raise AssertionError(f"no end: {said}")


@pytest.mark.parametrize("dialect", list(_WRITTEN))
def test_a_model_that_calls_the_same_again_ends(embedded: _Vocabulary, dialect: str) -> None:
    opening, between, closing, write = _WRITTEN[dialect]
    one, two, more = ([write(name, 1, at) for at in range(9)] for name in ("find", "now", "find"))
    for words in (embedded, *([_with_marks(dialect)] if dialect in _SPECIAL else [])):
        again = _insist(words, _start(words, dialect), opening + between.join(one))
        assert again == opening + between.join(one[:2]) + closing
    wanted = between.join([one[0], two[1], more[2], two[3]])
    assert _insist(embedded, _start(embedded, dialect), opening + wanted) == (
        opening + between.join([one[0], two[1], more[2]]) + closing
    )


@pytest.mark.parametrize("dialect", list(_WRITTEN))
def test_calls_that_differ_go_on(embedded: _Vocabulary, dialect: str) -> None:
    opening, between, closing, write = _WRITTEN[dialect]
    calls = between.join(write("find", n, n) for n in (1, 2, 3, 11, 12))
    grammar = _start(embedded, dialect)
    assert _insist(embedded, grammar, opening + calls + closing) == opening + calls + closing
    alone = _start(embedded, dialect, one_call=True)
    first = opening + write("find", 1, 1) + closing
    assert _insist(embedded, alone, opening + calls) == first


def test_a_call_within_a_text_of_another_is_no_call(embedded: _Vocabulary) -> None:
    inner = '[find(n=1), find(n=2, t="find(n=2), find(n=1)"), now(n=2), find(n=3)]'
    assert _insist(embedded, _start(embedded, "pythonic"), inner) == inner


def test_behind_drafts_as_without_them(embedded: _Vocabulary) -> None:
    opening, between, closing, write = _WRITTEN["pythonic"]
    text = opening + between.join([write("find", 1, 0)] * 2)
    *first, last = embedded.tokenizer.encode(text, add_special_tokens=False)
    grammar = _start(embedded, "pythonic")
    assert grammar.accept_tokens("q", first)
    behind = _allowed(embedded, grammar, [last])
    assert grammar.accept_tokens("q", [last])
    assert (
        _allowed(embedded, grammar)
        == behind
        == embedded.tokenizer.encode(closing, add_special_tokens=False)
    )


def test_calls_that_count_up_come_to_an_end(embedded: _Vocabulary) -> None:
    opening, between, closing, write = _WRITTEN["pythonic"]
    calls = [write("now", n, n) for n in range(MAX_CALLS + 9)]
    said = _insist(embedded, _start(embedded, "pythonic"), opening + between.join(calls), 1 << 13)
    assert said == opening + between.join(calls[:MAX_CALLS]) + closing
