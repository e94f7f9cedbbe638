"""Pure cache policy against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.core.v4_geometry import BF16, FP32, v4_config
from vllm.exceptions import ConfigError
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.retention.boundaries import (
    needed_window_blocks,
    replay_boundaries,
    step_boundaries,
    trailing_boundaries,
)
from vllm.v1.core.retention.pinning import num_dropped_blocks
from vllm.v1.core.retention.sizes import max_request_blocks, max_window_blocks
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CompressorStateSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

GEOMETRIES = {unit: CacheGeometry.from_config(v4_config(unit, 10)) for unit in (32, 64, 128)}
units = st.sampled_from([32, 64, 128])


def rows_read_at(group: GroupGeometry, position: int) -> set[int]:
    """Which stored rows computing token ``position`` reads, from the model's definition.

    A window row: the 127 before it. A compressor of rate r: when token p completes a window
    ((p + 1) % r == 0) it pools that window's tokens, with overlap also the previous window's; the
    tokens still to come complete the open window and the ones after it.
    """
    if group.align == 1:
        return set(range(max(0, position - group.keep), position))
    rate = group.align
    reads: set[int] = set()
    # Windows completed at or after `position` whose tokens reach below it.
    for k in (position // rate, position // rate + 1):
        first = k * rate - (rate if group.keep else 0)
        reads |= {row for row in range(max(0, first), (k + 1) * rate) if row < position}
    return reads


@given(unit=units, position=st.integers(0, 1000))
def test_first_needed_is_the_lowest_row_ever_read_again(unit: int, position: int) -> None:
    for group in GEOMETRIES[unit].windows:
        reads = rows_read_at(group, position)
        assert group.first_needed(position) == (min(reads) if reads else position)


@given(unit=units, position=st.integers(0, 700), extra=st.integers(0, 300))
def test_first_needed_never_moves_down(unit: int, position: int, extra: int) -> None:
    for group in GEOMETRIES[unit].groups:
        assert group.first_needed(position) <= group.first_needed(position + extra)


@given(unit=units, start=st.integers(0, 700), length=st.integers(1, 900))
def test_dropped_blocks_are_those_computed_and_not_kept(unit: int, start: int, length: int) -> None:
    geometry, end = GEOMETRIES[unit], start + length
    dropped = []
    for group in geometry.windows:
        computed = {row // group.block_size for row in range(start, end)}
        kept = {row // group.block_size for row in range(group.first_needed(end), end)}
        # A block that is not full yet is written by the next step, needed or not.
        kept |= {end // group.block_size}
        dropped.append(len(computed - kept))
    assert num_dropped_blocks(geometry, start, end) == max(dropped)


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_a_decode_step_drops_one_block_at_most(unit: int) -> None:
    assert {num_dropped_blocks(GEOMETRIES[unit], p, p + 1) for p in range(1000)} == {0, 1}


@given(unit=units, n=st.integers(1, 40_000))
def test_dense_blocks_hold_exactly_the_complete_rows(unit: int, n: int) -> None:
    for group in GEOMETRIES[unit].dense:
        rows, per_block = n // group.ratio, group.block_size // group.ratio
        assert group.num_dense_blocks(n) == (rows + per_block - 1) // per_block


@given(unit=units, n=st.integers(1, 3000))
def test_replay_boundaries_serve_a_resend_and_a_longer_sibling(unit: int, n: int) -> None:
    geometry = GEOMETRIES[unit]
    kept = replay_boundaries(geometry, n)
    assert list(kept) == sorted(set(kept))
    resend = max(p for p in range(0, n, unit))
    sibling = max(p for p in range(0, n + 1, unit))
    assert n // 512 == 0 or n // 512 * 512 in kept
    for wanted in (resend, sibling):
        assert wanted == 0 or wanted in kept
        lean = wanted // 128 * 128
        assert lean == 0 or lean in kept
    assert all(p % unit == 0 and 0 < p <= n for p in kept)
    assert len(kept) <= 5
    fewer = replay_boundaries(geometry, n, keeps_coarse=False)
    assert set(kept) - set(fewer) <= {n // 512 * 512}


@given(unit=units, position=st.integers(0, 3000))
def test_trailing_boundaries(unit: int, position: int) -> None:
    kept = trailing_boundaries(GEOMETRIES[unit], position)
    assert set(kept) == {position // unit * unit, position // 128 * 128} - {0}


@given(unit=units, start=st.integers(0, 2000), count=st.integers(1, 900), n=st.integers(1, 3000))
def test_step_boundaries_lie_in_the_step(unit: int, start: int, count: int, n: int) -> None:
    geometry = GEOMETRIES[unit]
    end = start + count
    replay = replay_boundaries(geometry, n)
    chosen = step_boundaries(geometry, start, end, replay)
    expected = {*replay, *trailing_boundaries(geometry, end)}
    assert chosen == tuple(sorted(p for p in expected if start < p <= end))


@given(
    unit=units,
    start=st.integers(0, 1000),
    count=st.integers(1, 600),
    lookahead=st.integers(0, 5),
    prompt=st.integers(1, 1600),
)
def test_needed_window_blocks_against_rows(
    unit: int, start: int, count: int, lookahead: int, prompt: int
) -> None:
    geometry = GEOMETRIES[unit]
    end = start + count
    boundaries = step_boundaries(geometry, start, end, replay_boundaries(geometry, prompt))
    for group in geometry.windows:
        rows = set(range(group.first_needed(end), end + lookahead))
        for p in boundaries:
            rows |= set(range(group.first_needed(p), p))
        blocks = sorted({row // group.block_size for row in rows})
        assert needed_window_blocks(group, end, end + lookahead, boundaries) == blocks
        below = {r // group.block_size for r in range(group.first_needed(start), start)}
        assert len(below | set(blocks)) <= max_window_blocks(geometry, group, lookahead)


def test_needed_window_blocks_without_boundaries_slides() -> None:
    window = GEOMETRIES[32].windows[0]
    assert needed_window_blocks(window, 1000, 1000, ()) == [27, 28, 29, 30, 31]


@given(unit=units, start=st.integers(0, 500), count=st.integers(1, 500), n=st.integers(1, 1200))
def test_chunks_end_on_lean_boundaries_or_the_prompts_end(
    unit: int, start: int, count: int, n: int
) -> None:
    end = GEOMETRIES[unit].chunk_end(start, start + count, n)
    assert start < end <= start + count
    lean = [p for p in range(start + 1, start + count + 1) if p % 128 == 0]
    if start + count >= n or not lean:
        assert end == start + count
    else:
        assert end == max(lean)


def test_admission_grows_with_the_tokens_not_faster() -> None:
    geometry = GEOMETRIES[32]
    costs = [max_request_blocks(geometry, n) for n in range(1, 20_000, 777)]
    assert costs == sorted(costs)
    # Windows are capped: far tokens only cost dense blocks.
    assert max_request_blocks(geometry, 16_384) - max_request_blocks(geometry, 8_192) == 64 + 2


def test_blocks_that_do_not_fit_the_unit_are_refused() -> None:
    odd = SlidingWindowMLASpec(48, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=128)
    with pytest.raises(ConfigError, match="48 tokens"):
        odd.geometry(0, 32)
    wide = SlidingWindowMLASpec(64, num_kv_heads=1, head_size=8, dtype=BF16, sliding_window=128)
    with pytest.raises(ConfigError, match="do not divide"):
        wide.geometry(0, 32)
    chunked = ChunkedLocalAttentionSpec(
        32, num_kv_heads=1, head_size=8, dtype=BF16, attention_chunk_size=64
    )
    with pytest.raises(ConfigError, match="ChunkedLocalAttentionSpec"):
        chunked.geometry(0, 32)
    sinks = SinkFullAttentionSpec(32, num_kv_heads=1, head_size=8, dtype=BF16, sink_len=4)
    with pytest.raises(ConfigError, match="SinkFullAttentionSpec"):
        sinks.geometry(0, 32)


def test_full_attention_is_dense() -> None:
    full = FullAttentionSpec(32, num_kv_heads=1, head_size=8, dtype=BF16)
    group = full.geometry(0, 32)
    assert (group.is_window, group.ratio, group.first_needed(1000)) == (False, 1, 0)


def test_other_rates_have_other_lean_boundaries() -> None:
    state = CompressorStateSpec(
        8,
        num_kv_heads=1,
        head_size=8,
        dtype=FP32,
        sliding_window=16,
        state_ratio=16,
        state_overlap=False,
    )
    group = state.geometry(0, 32)
    assert (group.first_needed(40), group.first_needed(48)) == (32, 48)
