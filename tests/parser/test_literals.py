"""Values as models write them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.parser.literals import LiteralStream, read_literal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner),
    max_leaves=8,
)  # fmt: skip

# Brackets, quotes, and what some take for white space.
ODD = [*"[]{}()\"'\\,:= \n\ta1-.N", "\u00a0", "\x0b", "\x00", "\u2028", "\U0001f98a"]


def stream(text: str, length: int) -> tuple[str, bool]:
    reader, told = LiteralStream(), ""
    for at in range(0, len(text), length):
        out, end = reader.add(text[at : at + length])
        told += out
        if reader.is_over or reader.fault:
            return told, reader.is_over and not text[at + end :]
    return told + reader.finish(), reader.is_over


@settings(max_examples=200, deadline=None)
@given(value=JSON, length=st.integers(1, 5), ascii_=st.booleans())
def test_json_keeps_its_spelling(value: Any, length: int, ascii_: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_)
    assert stream(text, length) == (text, True)


@settings(max_examples=200, deadline=None)
@given(value=JSON, length=st.integers(1, 5))
def test_python_is_read_as_python_reads_it(value: Any, length: int) -> None:
    told, is_whole = stream(repr(value), length)
    assert is_whole
    assert json.loads(told) == value


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from(ODD), max_size=12), loose=st.booleans())
def test_any_text_is_read_to_its_end(text: str, loose: bool) -> None:
    whole, letters, told = LiteralStream(loose=loose), LiteralStream(loose=loose), ""
    out, end = whole.add(text)
    for char in text:
        told += letters.add(char)[0]
    assert (told, letters.is_over) == (out, whole.is_over)
    assert bool(letters.fault) == bool(whole.fault)
    assert end == len(text) or whole.is_over or whole.fault


@pytest.mark.parametrize(
    "text",
    [
        *("", "nope", "\u00a0", "NaN", "[1", "[1]]", "[,]", "{,}", "{1: 2}", "{'a' 1}"),
        *("{'a': }", "'it's'", "(1)", "1 2", "007", "[1 2]", '"a" "b"', "{a}", '"\\ud8"'),
        *('"\\xg0"', "f()", "{'a': {}", "--1", "+", "b'x'"),
    ],
)
def test_what_is_no_value(text: str) -> None:
    assert read_literal(text) is None
