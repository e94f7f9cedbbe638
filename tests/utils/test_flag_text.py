"""Flags that take a text."""

import argparse

import pytest

from vllm.utils.flag_text import filled_text


def test_empty_texts_are_refused_where_one_is_wanted() -> None:
    assert filled_text("a b") == "a b"
    for text in ("", "  "):
        with pytest.raises(argparse.ArgumentTypeError, match="is empty"):
            filled_text(text)
