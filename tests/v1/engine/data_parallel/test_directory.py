"""The index of prefixes against a brute-force one."""

import random

import pytest

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    NullEventPublisher,
)
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges
from vllm.v1.engine.data_parallel.directory import CacheShape, PrefixDirectory, spread
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
        return best if span is None else max(best, (dense - span) // UNIT * UNIT)


def store(group: int, hashes: list[int], parent: int | None, step: int) -> BlockStored:
    return BlockStored(hashes, parent, [], step, None, None, None, group_idx=group)


class Cache:
    """A replica's blocks as a tree of prompts fills and empties them, in any order."""

    def __init__(self, shape: CacheShape, rng: random.Random) -> None:
        self.shape, self.rng = shape, rng
        self.held: set[tuple[int, int]] = set()
        self.changes = CacheChanges(NullEventPublisher(), epoch=1)

    def act(self, prompt: list[int]) -> CoreStatus:
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if self.rng.random() < 0.05:
            self.held.clear()
            events.append(AllBlocksCleared())
        for group, step in enumerate(self.shape.steps):
            stride = max(1, step // UNIT)
            reached = self.rng.randint(0, len(prompt) // stride) * stride
            for i in range(stride - 1, reached, stride):
                key = (group, prompt[i])
                if key in self.held or (not step and self.rng.random() < 0.7):
                    continue
                parent = prompt[i - stride] if step and i >= stride else None
                events.append(store(group, [prompt[i]], parent, step))
                self.held.add(key)
        for key in sorted(self.held):
            if self.rng.random() < 0.15:
                self.held.discard(key)
                events.append(BlockRemoved([key[1]], None, group_idx=key[0]))
        self.changes.publish(KVEventBatch(0.0, events))
        if self.rng.random() < 0.1:
            self.changes.tell_all()
        told = self.changes.take(0, 0, self.rng.randrange(10**9))
        assert told is not None
        return told


def prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that share beginnings: a hash stands for all that comes before it."""
    known: list[list[int]] = [[]]
    for number in range(6):
        start = rng.choice(known)
        cut = start[: rng.randint(0, len(start))]
        known.append(cut + [1000 * (number + 1) + i for i in range(rng.randint(1, 12))])
    return known[1:]


@pytest.mark.parametrize(
    "shape", [HYBRID, PLAIN, CacheShape(UNIT, (0,)), CacheShape(UNIT, (32, 0), 70)]
)
@pytest.mark.parametrize("seed", range(8))
def test_any_history_is_told_as_brute_force_tells_it(shape: CacheShape, seed: int) -> None:
    # "Routers drop events of all but the first attention group".
    rng = random.Random(seed)
    texts = prompts(rng)
    directory, brute = PrefixDirectory(shape, 2), BruteForce(shape, 3)
    assert directory.add_replica() == 2
    caches = [Cache(shape, rng) for _ in range(3)]

    def check() -> None:
        for hashes in texts:
            num_tokens = rng.randint(1, (len(hashes) + 1) * UNIT)
            expected = [brute.find(r, hashes, num_tokens) for r in range(3)]
            assert directory.find_cached_tokens(hashes, num_tokens).tolist() == expected

    for _ in range(60):
        rank = rng.randrange(3)
        directory.apply(rank, caches[rank].act(rng.choice(texts)))
        brute.held[rank] = caches[rank].held
        check()
    directory.drop(1)
    brute.held[1] = set()
    check()
    for _ in range(1000):
        directory.sweep()
    check()
    stands_for = {g: g if step else shape.steps.index(0) for g, step in enumerate(shape.steps)}
    left = {(stands_for[g], short) for held in brute.held for g, short in held}
    assert directory.num_entries == len(left)


def test_a_replica_that_is_forgotten_again_and_again_takes_no_more_room() -> None:
    directory = PrefixDirectory(PLAIN, 200)
    for rank in range(200):
        directory.apply(rank, CoreStatus(0, 0, 0, stored={0: [1, 2]}))
    for start in range(3000):
        told = CoreStatus(0, 0, 0, is_cleared=True, stored={0: [1, start + 10]})
        directory.apply(7, told)
    cached = directory.find_cached_tokens([1, 2], 65)
    assert cached[7] == 32
    assert [n for rank, n in enumerate(cached.tolist()) if rank != 7] == [64] * 199
    for _ in range(1000):
        directory.sweep()
    assert directory.num_entries == 3
    assert len(directory.find_cached_tokens([1], 33)) == 200


def test_memory_is_bounded() -> None:
    directory = PrefixDirectory(PLAIN, 2, max_entries=10)
    directory.apply(0, CoreStatus(0, 0, 0, stored={0: list(range(100))}))
    assert directory.num_entries == 10
    # Known ones are entered for further cores, and what goes makes room.
    directory.apply(1, CoreStatus(0, 0, 0, stored={0: list(range(20))}))
    assert directory.num_entries == 10
    assert directory.find_cached_tokens(list(range(20)), 641).tolist() == [320, 320]
    directory.apply(0, CoreStatus(0, 0, 0, removed={0: list(range(100))}))
    directory.apply(1, CoreStatus(0, 0, 0, removed={0: list(range(100))}))
    assert directory.num_entries == 0


def test_the_last_token_is_always_computed() -> None:
    directory = PrefixDirectory(PLAIN, 1)
    directory.apply(0, CoreStatus(0, 0, 0, stored={0: [1, 2]}))
    assert directory.find_cached_tokens([1, 2], 64).tolist() == [32]
    assert directory.find_cached_tokens([1, 2], 65).tolist() == [64]


def test_values_are_spread_over_slots():
    """Against going through all bits, with few holders, nearly all, and all."""
    rng = random.Random(4)
    for num_slots in (1, 3, 40, 200):
        for _ in range(60):
            expected = [rng.choice((0, 0, 7, 7, 7, 7, 9)) for _ in range(num_slots)]
            values = sorted(set(expected) - {0}, reverse=True)
            found = [(v, sum(1 << i for i, x in enumerate(expected) if x == v)) for v in values]
            assert spread(found, num_slots).tolist() == expected
    assert spread([(5, (1 << 40) - 1)], 40).tolist() == [5] * 40
