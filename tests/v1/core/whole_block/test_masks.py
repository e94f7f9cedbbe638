"""The sliding-window mask against an oracle: kept iff a lookup at a wanted boundary needs it."""

from functools import cache
from itertools import product

import pytest

from tests.v1.core.cache_helpers import make_request
from tests.v1.core.specs import swa
from vllm.exceptions import ConfigError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.core.whole_block.masks import (
    num_window_tail_blocks,
    pinned_tail,
    resolve_retention_interval,
    sliding_window_block_mask,
)

BLOCK_SIZE = 2
# Blocks judged, and blocks of the prompt they begin: every tail that meets the first is whole.
NUM_BLOCKS = 8
NUM_PROMPT_BLOCKS = 24


def find_hit(missing: int | None, window: int, per: int, eagle: bool, max_length: int) -> int:
    """Return the tokens hit when all blocks but one are cached."""
    pool = BlockPool(NUM_PROMPT_BLOCKS + 1, True, BLOCK_SIZE)
    request = make_request("0", range(NUM_PROMPT_BLOCKS * BLOCK_SIZE), BLOCK_SIZE)
    blocks = pool.get_new_blocks(NUM_PROMPT_BLOCKS)
    pool.cache_full_blocks(request, blocks, 0, NUM_PROMPT_BLOCKS, BLOCK_SIZE, 0)
    if missing is not None:
        pool.evict_blocks([blocks[missing].block_id])
    (hit,) = SlidingWindowManager.find_longest_cache_hit(
        block_hashes=request.block_hashes,
        max_length=max_length,
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=swa(block_size=BLOCK_SIZE, sliding_window=window),
        drop_eagle_block=eagle,
        alignment_tokens=per * BLOCK_SIZE,
    )
    return len(hit) * BLOCK_SIZE


@cache
def needed_at(boundary: int, window: int, per: int, eagle: bool) -> frozenset[int] | None:
    """Return the blocks whose loss alone spoils a hit at a boundary; None if none happens there."""
    max_length = boundary + eagle * BLOCK_SIZE
    if find_hit(None, window, per, eagle, max_length) != boundary:
        return None
    return frozenset(
        i for i in range(NUM_BLOCKS) if find_hit(i, window, per, eagle, max_length) != boundary
    )


def oracle(
    window: int, per: int, eagle: bool, segments: int | None, num_prompt_tokens: int
) -> set[int]:
    """Return the blocks some wanted boundary needs. ``segments`` is the interval in alignments."""
    alignment = per * BLOCK_SIZE
    end = (NUM_PROMPT_BLOCKS - eagle) * BLOCK_SIZE
    step = alignment if segments is None else segments * alignment
    wanted = set(range(step, end + 1, step)) if step else set()
    if segments is not None:
        wanted.add((num_prompt_tokens - 1) // alignment * alignment)
    needed: set[int] = set()
    for boundary in wanted - {0}:
        needed |= needed_at(boundary, window, per, eagle) or set()
    return needed


CASES = list(product(range(2, 9), range(1, 5), (False, True), (None, 0, 1, 2, 3)))


def test_kept_iff_some_wanted_boundary_needs_it() -> None:
    num_sparse = 0
    for window, per, eagle, segments in CASES:
        need = num_window_tail_blocks(window, BLOCK_SIZE, eagle)
        for num_prompt_tokens in range(1, NUM_BLOCKS * BLOCK_SIZE + 1, 3):
            replay_blocks = (num_prompt_tokens - 1) // (per * BLOCK_SIZE) * per
            if segments is not None and replay_blocks + eagle < need:
                # A tail clipped by the prompt's start: kept, but a drafter's lookup aligns it away.
                continue
            mask = sliding_window_block_mask(
                0,
                NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                window=window,
                alignment_tokens=per * BLOCK_SIZE,
                use_eagle=eagle,
                retention_interval=None if segments is None else segments * per * BLOCK_SIZE,
                num_prompt_tokens=num_prompt_tokens,
            )
            if mask is None:
                assert need >= per * (1 if segments is None else segments)
                continue
            num_sparse += 1
            kept = {i for i, keep in enumerate(mask) if keep}
            expected = oracle(window, per, eagle, segments, num_prompt_tokens)
            assert kept == expected, (window, per, eagle, segments, num_prompt_tokens)
    assert num_sparse > 300


def mask_of(start: int, end: int, **kw: int | bool | None) -> list[bool] | None:
    defaults = {
        "block_size": 8,
        "window": 8,
        "alignment_tokens": 32,
        "use_eagle": False,
        "retention_interval": None,
        "num_prompt_tokens": 128,
    }
    return sliding_window_block_mask(start, end, **{**defaults, **kw})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "ruler"),
    [
        ({}, "...#...#...#...#"),
        ({"retention_interval": 64}, ".......#...#...#"),
        ({"retention_interval": 0}, "...........#...."),
        ({"use_eagle": True}, "...##..##..##..#"),
    ],
)
def test_the_ruler_of_the_docstring(options: dict[str, int | bool], ruler: str) -> None:
    assert sliding_window_block_mask.__doc__ is not None
    assert ruler in sliding_window_block_mask.__doc__
    mask = mask_of(0, 16, **options)
    assert mask is not None
    assert "".join(".#"[keep] for keep in mask) == ruler


def test_a_piece_is_a_slice_of_the_whole() -> None:
    for options in ({}, {"retention_interval": 64}, {"retention_interval": 0, "use_eagle": True}):
        whole = mask_of(0, 16, **options)
        assert whole is not None
        for start in range(17):
            for end in range(start, 17):
                assert mask_of(start, end, **options) == whole[start:end]


@pytest.mark.parametrize(
    ("options", "is_dense"),
    [
        ({"alignment_tokens": None}, True),
        # Four blocks to a segment of 32: dense once the window needs four.
        ({"window": 25}, False),
        ({"window": 26}, True),
        ({"window": 25, "use_eagle": True}, True),
        ({"window": 26, "retention_interval": 64}, False),
        ({"window": 58, "retention_interval": 64}, True),
        ({"window": 58, "retention_interval": 0}, False),
    ],
)
def test_dense_when_tails_meet(options: dict[str, int | bool | None], is_dense: bool) -> None:
    assert (mask_of(0, 16, **options) is None) is is_dense


def test_without_a_known_prompt_there_is_no_replay_tail() -> None:
    assert mask_of(0, 16, retention_interval=0, num_prompt_tokens=None) == [False] * 16
    assert mask_of(0, 16, retention_interval=0, num_prompt_tokens=0) == [False] * 16


def test_unaligned_boundaries_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        mask_of(0, 4, alignment_tokens=12)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("none", None), ("auto", 0), (0, 0), ("0", 0), (64, 64), ("128", 128)],
)
def test_interval_with_windows(value: int | str | None, expected: int | None) -> None:
    resolved = resolve_retention_interval(value, has_window_groups=True, scheduler_block_size=32)
    assert resolved == expected


@pytest.mark.parametrize("value", ["sometimes", "", "4k", 33, -32, "48"])
def test_bad_interval(value: int | str) -> None:
    with pytest.raises(ConfigError, match="none"):
        resolve_retention_interval(value, has_window_groups=True, scheduler_block_size=32)


def test_pinned_tail_is_what_a_resume_reads() -> None:
    for window, block_size, per, eagle in product(
        range(2, 12), (1, 2, 4), range(1, 5), (False, True)
    ):
        alignment = per * block_size
        for num_tokens in range(40):
            boundary = num_tokens // alignment * alignment
            first, end = pinned_tail(
                boundary, num_tokens, block_size=block_size, window=window, use_eagle=eagle
            )
            rows = range(max(boundary - window + 1, 0), boundary)
            needed = {row // block_size for row in rows}
            # A drafter's hit drops the block after the boundary, if that is full.
            if eagle and boundary and num_tokens >= boundary + block_size:
                needed.add(boundary // block_size)
            assert needed <= set(range(first, end))
            assert len(range(first, end)) <= num_window_tail_blocks(window, block_size, eagle)
            assert end * block_size <= num_tokens
            if boundary == 0:
                assert (first, end) == (0, 0), "nothing is resumed there"
