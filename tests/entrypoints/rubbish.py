"""Random JSON that looks a little like what an API takes."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "a", "user", "assistant", "text", "{}", "\ud800", "x" * 70]),
)


def json_like(names: Sequence[str], words: Sequence[str]) -> st.SearchStrategy[Any]:
    """Values whose objects have fields of ``names`` and, among others, texts of ``words``."""
    leaves = st.one_of(LEAVES, st.sampled_from(list(words)))
    fields = st.sampled_from(list(names))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(fields, inner, max_size=5)
        ),
        max_leaves=12,
    )
