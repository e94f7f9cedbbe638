"""Forced calls end behind one that is there already, in every format that allows several."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.v1.structured_output.conftest import EOS, VOCAB, Reader
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers.chat_tools import parse_tools
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


def _start(reader: Reader, dialect: str, *, one_call: bool = False) -> Grammar:
    tag = answer_tag(dialect, AnswerGrammar(_TOOLS, one_call=one_call))
    made = reader.backend.compile(StructuredOutputsParams(structural_tag=tag))
    return Grammar(made, frozenset([EOS]))


def _allowed(reader: Reader, grammar: Grammar, drafts: Sequence[int] = ()) -> list[int]:
    """What may follow behind drafts."""
    bits = np.full((len(drafts) + 1, -(-VOCAB // 32)), -1, dtype=np.int32)
    reader.backend.fill([MaskWork(grammar, 0, drafts)], bits)
    row = np.unpackbits(bits[-1:].view(np.uint8), axis=1, count=VOCAB, bitorder="little")[0]
    return np.flatnonzero(row).tolist()


def _insist(reader: Reader, grammar: Grammar, wanted: str, limit: int = 600) -> str:
    """What a model says that wants a text, in the longest tokens that fit it, and else the end."""
    said = ""
    for _ in range(limit):
        texts = {
            reader.tokenizer.decode([token_id], skip_special_tokens=False): token_id
            for token_id in _allowed(reader, grammar)
        }
        if fits := [text for text in texts if text and wanted.startswith(said + text)]:
            taken = max(fits, key=len)
        elif EOS in texts.values():
            return said
        else:
            taken = max(texts, key=len)
        assert grammar.accept_tokens("q", [texts[taken]])
        said += taken
    raise AssertionError(f"no end: {said}")


@pytest.mark.parametrize("dialect", list(_WRITTEN))
def test_a_model_that_calls_the_same_again_ends(reader: Reader, dialect: str) -> None:
    opening, between, closing, write = _WRITTEN[dialect]
    one, two, more = ([write(name, 1, at) for at in range(9)] for name in ("find", "now", "find"))
    again = _insist(reader, _start(reader, dialect), opening + between.join(one))
    assert again == opening + between.join(one[:2]) + closing
    wanted = between.join([one[0], two[1], more[2], two[3]])
    assert _insist(reader, _start(reader, dialect), opening + wanted) == (
        opening + between.join([one[0], two[1], more[2]]) + closing
    )


@pytest.mark.parametrize("dialect", list(_WRITTEN))
def test_calls_that_differ_go_on(reader: Reader, dialect: str) -> None:
    opening, between, closing, write = _WRITTEN[dialect]
    calls = between.join(write("find", n, n) for n in (1, 2, 3, 11, 12))
    grammar = _start(reader, dialect)
    assert _insist(reader, grammar, opening + calls + closing) == opening + calls + closing
    alone = _start(reader, dialect, one_call=True)
    first = opening + write("find", 1, 1) + closing
    assert _insist(reader, alone, opening + calls) == first


def test_a_call_within_a_text_of_another_is_no_call(reader: Reader) -> None:
    inner = '[find(n=1), find(n=2, t="find(n=2), find(n=1)"), now(n=2), find(n=3)]'
    assert _insist(reader, _start(reader, "pythonic"), inner) == inner


def test_behind_drafts_as_without_them(reader: Reader) -> None:
    opening, between, closing, write = _WRITTEN["pythonic"]
    *first, last = reader.encode(opening + between.join([write("find", 1, 0)] * 2))
    grammar = _start(reader, "pythonic")
    assert grammar.accept_tokens("q", first)
    behind = _allowed(reader, grammar, [last])
    assert grammar.accept_tokens("q", [last])
    assert _allowed(reader, grammar) == behind == reader.encode(closing)


def test_calls_that_count_up_come_to_an_end(reader: Reader) -> None:
    opening, between, closing, write = _WRITTEN["pythonic"]
    calls = [write("now", n, n) for n in range(MAX_CALLS + 9)]
    said = _insist(reader, _start(reader, "pythonic"), opening + between.join(calls), 1 << 13)
    assert said == opening + between.join(calls[:MAX_CALLS]) + closing
