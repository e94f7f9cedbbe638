"""Reasoning that clients carry without reading it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.openai.opaque_reasoning import open_reasoning, seal_reasoning

pytestmark = pytest.mark.slow  # hypothesis reads the tables of Unicode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXTS)
def test_it_comes_back(text: str) -> None:
    sealed = seal_reasoning(text)
    assert sealed.isascii()
    assert sealed.isprintable()
    assert open_reasoning(sealed) == text


@given(TEXTS, st.data())
def test_an_altered_one_does_not_open(text: str, data: st.DataObject) -> None:
    sealed = seal_reasoning(text)
    at = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.characters(exclude_characters=sealed[at]))
    assert open_reasoning(sealed[:at] + other + sealed[at + 1 :]) is None


@given(st.text())
def test_foreign_ones_do_not_open(text: str) -> None:
    assert open_reasoning(text) is None
    assert open_reasoning("rsn1." + text) is None
