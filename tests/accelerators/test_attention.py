"""Attention over gathered keys, the indexer and the compressor against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerators.comparing import assert_near
from tests.accelerators.test_elementwise import random
from vllm.v1.attention.ops import decoder, reference
from vllm.v1.attention.ops.triton.registry import get_triton_op

pytestmark = pytest.mark.slow

few = settings(max_examples=6)


def make_mask(*shape: int) -> torch.Tensor:
    """Hides a third of the keys, and all of them from the last query."""
    mask = torch.where(random(9, *shape) < -0.4, -torch.inf, 0.0)
    mask[..., 0] = 0.0
    return mask


@few
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 200),
    st.integers(1, 30),
    st.sampled_from([0.0, 2.0]),
    st.booleans(),
)
def test_grouped_queries(
    heads: int, queries: int, keys: int, width: int, cap: float, is_shared: bool
) -> None:
    q = random(1, 2, heads, queries, width)
    k, v = (random(seed, 2, 1 if is_shared else heads, keys, width) for seed in (2, 3))
    op = get_triton_op("attend_keys")
    for mask in (None, make_mask(2, 1, queries, keys), make_mask(1, 1, 1, keys)):
        args = (q, k, v, mask, False, 0.3, cap)
        for found, expected in zip(op(*args), decoder.attend_explicitly(*args), strict=True):
            assert_near(found, expected)
    args = (q, k[:, :, :queries], v[:, :, :queries], None, True, 0.3, cap)
    if keys >= queries:
        for found, expected in zip(op(*args), decoder.attend_explicitly(*args), strict=True):
            assert_near(found, expected)


def test_a_query_without_keys_gets_zeros() -> None:
    q, k = random(1, 1, 2, 3, 8), random(2, 1, 2, 0, 8)
    output, sums = get_triton_op("attend_keys")(q, k, k, None, False, 1.0, 0.0)
    assert torch.equal(output, torch.zeros_like(q))
    assert torch.equal(sums, torch.full((1, 2, 3), -torch.inf))


def test_halves_of_a_context_join() -> None:
    q, k, v = random(1, 2, 3, 5, 16), random(2, 2, 3, 90, 16), random(3, 2, 3, 90, 16)
    op = get_triton_op("attend_keys")
    parts = [
        op(q, k[:, :, p], v[:, :, p], None, False, 0.3, 0.0) for p in (slice(40), slice(40, 90))
    ]
    output, sums = get_triton_op("join_attention")(*parts)
    expected = decoder.attend_explicitly(q, k, v, None, False, 0.3, 0.0)
    assert_near(output, expected[0])
    assert_near(sums, expected[1])


@few
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 150), st.integers(1, 40), st.booleans())
def test_one_shared_key(queries: int, heads: int, keys: int, width: int, is_masked: bool) -> None:
    q, k = random(1, 2, queries, heads, width), random(2, 2, 1 + keys, width)
    k[:, 0] = 0
    mask = make_mask(2, queries, 1, max(1, keys // 2)) if is_masked and keys else None
    sinks = random(3, heads)
    assert_near(get_triton_op("attend")(q, k, mask, sinks), reference.attend(q, k, mask, sinks))


@few
@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 30))
def test_compressor(windows: int, ratio: int, width: int) -> None:
    op = get_triton_op("compress_windows")
    current, previous = random(1, windows, ratio, 4 * width), random(2, windows, ratio, 4 * width)
    lacks = random(3, windows, 1, 1) < 0
    # What does not exist is NaN: it must not be read.
    broken = previous.masked_fill(lacks, torch.nan)
    expected = reference.compress_windows(current, previous, lacks)
    assert_near(op(current, broken, lacks), expected)
    assert_near(op(current, previous, None), reference.compress_windows(current, previous, None))
    plain = current[:, :, : 2 * width]
    assert_near(op(plain, None, None), reference.compress_windows(plain, None, None))


@few
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 300), st.data())
def test_indexer(queries: int, heads: int, keys: int, data: st.DataObject) -> None:
    q, k, w = random(1, 2, queries, heads, 12), random(2, 2, keys, 12), random(3, 2, queries, heads)
    scores = reference.index_scores(q, k, w)
    assert_near(get_triton_op("index_scores")(q, k, w), scores)
    # Ties of every kind: whole numbers, both zeros, nothing visible.
    scores = (scores / 2).round()
    scores[0, 0, keys // 2 :] = -torch.inf
    num_selected = data.draw(st.integers(1, keys))
    chosen = get_triton_op("select_entries")(scores, num_selected)
    assert torch.equal(chosen, reference.select_entries(scores, num_selected))
    assert bool((chosen.sum(-1) == num_selected).all())
