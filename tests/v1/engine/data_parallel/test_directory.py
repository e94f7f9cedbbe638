"""The index of prefixes against a brute-force one."""

import random

import pytest

from vllm.v1.engine.data_parallel.directory import CacheShape, PrefixDirectory
from vllm.v1.engine.wire import CoreStatus

UNIT = 32
# Two dense groups, one of them coarse, and two that tell places to resume at.
HYBRID = CacheShape(UNIT, (32, 128, 0, 0))
PLAIN = CacheShape(UNIT, (32,))


class BruteForce:
    """Sets of (group, hash) by core."""

    def __init__(self, shape: CacheShape, num_cores: int) -> None:
        self.shape = shape
        self.held: list[set[tuple[int, int]]] = [set() for _ in range(num_cores)]

    def apply(self, rank: int, changes: CoreStatus) -> None:
        if changes.is_cleared:
            self.held[rank].clear()
        self.held[rank] -= {(g, h) for g, hashes in changes.removed.items() for h in hashes}
        self.held[rank] |= {(g, h) for g, hashes in changes.stored.items() for h in hashes}

    def find(self, rank: int, hashes: list[int], num_tokens: int) -> int:
        held, steps = self.held[rank], self.shape.steps
        best = dense = 0
        for i in range(min(len(hashes), (num_tokens - 1) // UNIT)):
            end = (i + 1) * UNIT
            needed = [g for g, step in enumerate(steps) if step and end % step == 0]
            if any((g, hashes[i]) not in held for g in needed):
                break
            dense = end
            places = [g for g, step in enumerate(steps) if not step]
            if not places or any((g, hashes[i]) in held for g in places):
                best = end
        span = self.shape.rebuild_tokens
        return best if span is None else max(best, dense - span)


def random_status(rng: random.Random, num_groups: int) -> CoreStatus:
    def pick() -> dict[int, list[int]]:
        return {
            g: rng.sample(range(24), rng.randrange(12))
            for g in rng.sample(range(num_groups), rng.randint(0, num_groups))
        }

    return CoreStatus(0, 0, 0, is_cleared=rng.random() < 0.05, stored=pick(), removed=pick())


@pytest.mark.parametrize(
    "shape", [HYBRID, PLAIN, CacheShape(UNIT, (0,)), CacheShape(UNIT, (32, 0), 70)]
)
@pytest.mark.parametrize("seed", range(8))
def test_any_history_is_told_as_brute_force_tells_it(shape: CacheShape, seed: int) -> None:
    # "Routers drop events of all but the first attention group".
    rng = random.Random(seed)
    directory, brute = PrefixDirectory(shape, 3), BruteForce(shape, 3)
    for _ in range(60):
        rank, changes = rng.randrange(3), random_status(rng, len(shape.steps))
        directory.apply(rank, changes)
        brute.apply(rank, changes)
        hashes = (
            rng.sample(range(24), rng.randint(0, 12)) if rng.random() < 0.3 else list(range(12))
        )
        num_tokens = rng.randint(1, 13 * UNIT)
        expected = [brute.find(r, hashes, num_tokens) for r in range(3)]
        assert directory.find_cached_tokens(hashes, num_tokens) == expected
        assert directory.num_entries == len(set().union(*brute.held))
    directory.drop(1)
    brute.held[1].clear()
    assert directory.find_cached_tokens(list(range(12)), 400) == [
        brute.find(r, list(range(12)), 400) for r in range(3)
    ]
    assert directory.num_entries == len(set().union(*brute.held))


def test_memory_is_bounded() -> None:
    directory = PrefixDirectory(PLAIN, 2, max_entries=10)
    directory.apply(0, CoreStatus(0, 0, 0, stored={0: list(range(100))}))
    assert directory.num_entries == 10
    # Known ones are entered for further cores, and what goes makes room.
    directory.apply(1, CoreStatus(0, 0, 0, stored={0: list(range(20))}))
    assert directory.num_entries == 10
    assert directory.find_cached_tokens(list(range(20)), 641) == [320, 320]
    directory.apply(0, CoreStatus(0, 0, 0, removed={0: list(range(100))}))
    directory.apply(1, CoreStatus(0, 0, 0, removed={0: list(range(100))}))
    assert directory.num_entries == 0


def test_the_last_token_is_always_computed() -> None:
    directory = PrefixDirectory(PLAIN, 1)
    directory.apply(0, CoreStatus(0, 0, 0, stored={0: [1, 2]}))
    assert directory.find_cached_tokens([1, 2], 64) == [32]
    assert directory.find_cached_tokens([1, 2], 65) == [64]
