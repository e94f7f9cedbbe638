"""Whole-row copies as a simultaneous assignment."""

import random

import pytest
import torch

from vllm.platforms.block_ops import copy_blocks, zero_blocks


def make_pools(num_blocks: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (num_blocks, stride), dtype=torch.uint8, generator=generator)
        for stride in (64, 640)
    ]


def expected_after(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    result = pool.clone()
    for source, destination in pairs:
        result[destination] = pool[source]
    return result


@pytest.mark.parametrize("scratch_bytes", [1, 256 << 20])
@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 2)],
        [(1, 2), (2, 3), (3, 4)],
        [(3, 4), (2, 3), (1, 2)],
        [(1, 2), (2, 1)],
        [(1, 2), (2, 3), (3, 1)],
        [(1, 5), (1, 6), (5, 7)],
        [(4, 4)],
    ],
    ids=str,
)
def test_pairs_read_before_any_is_written(pairs: list, scratch_bytes: int) -> None:
    pools = make_pools()
    expected = [expected_after(pool, pairs) for pool in pools]
    copy_blocks(pools, pairs, scratch_bytes)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_random_pairs(seed: int) -> None:
    rng = random.Random(seed)
    destinations = rng.sample(range(1, 12), rng.randint(1, 11))
    pairs = [(rng.randint(1, 11), destination) for destination in destinations]
    pools = make_pools()
    expected = [expected_after(pool, pairs) for pool in pools]
    copy_blocks(pools, pairs, scratch_bytes=rng.choice([1, 1000, 1 << 20]))
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool, wanted)


def test_nothing_to_do() -> None:
    pools = make_pools()
    before = [pool.clone() for pool in pools]
    copy_blocks(pools, [])
    zero_blocks(pools, [])
    assert all(torch.equal(a, b) for a, b in zip(pools, before, strict=True))


def test_zeroing_touches_the_named_rows_only() -> None:
    pools = make_pools()
    before = [pool.clone() for pool in pools]
    zero_blocks(pools, [3, 7])
    for pool, old in zip(pools, before, strict=True):
        assert not pool[[3, 7]].any()
        rest = [i for i in range(12) if i not in (3, 7)]
        assert torch.equal(pool[rest], old[rest])


def test_the_null_block_and_double_writes_are_our_bugs() -> None:
    for pairs in ([(0, 1)], [(1, 0)], [(1, 3), (2, 3)]):
        with pytest.raises(AssertionError):
            copy_blocks(make_pools(), pairs)
    with pytest.raises(AssertionError):
        zero_blocks(make_pools(), [1, 0])
