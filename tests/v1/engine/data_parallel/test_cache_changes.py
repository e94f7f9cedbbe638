"""What a core tells: the first block of a prefix that comes, the last one that goes."""

import random
from collections import Counter

import pytest

from tests.v1.engine.fakes import build_fake_core
from tests.v1.engine.test_core import add, request, run
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    NullEventPublisher,
)
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges
from vllm.v1.engine.data_parallel.ranks import agree_on_hashes, make_rank_config
from vllm.v1.engine.data_parallel.router import make_prompt_hasher
from vllm.v1.engine.data_parallel.short_hash import shorten
from vllm.v1.request_options import RequestOptions


def stored(group: int, *hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [], 32, None, None, None, group_idx=group)


def removed(group: int, *hashes: int) -> BlockRemoved:
    return BlockRemoved(list(hashes), None, group_idx=group)


def publish(changes: CacheChanges, *events) -> None:
    changes.publish(KVEventBatch(0.0, list(events)))


def test_the_same_changes_are_told_once() -> None:
    changes = CacheChanges(NullEventPublisher())
    publish(changes, stored(0, 1, 2), stored(0, 2), removed(0, 1))
    told = changes.take(1, 0, 9)
    assert told is not None
    assert (told.stored, told.removed) == ({0: [2]}, {})
    assert changes.take(1, 0, 9) is None
    assert changes.take(2, 0, 9) is not None
    publish(changes, removed(0, 2))
    assert changes.take(2, 0, 9).removed == {}
    publish(changes, removed(0, 2))
    assert changes.take(2, 0, 9).removed == {0: [2]}


def test_what_lies_behind_the_pool_is_no_change_of_it() -> None:
    changes = CacheChanges(NullEventPublisher())
    assert changes.take(1, 0, 9) is not None
    for medium in ("CPU", "STORAGE"):
        event = stored(0, 1)
        event.medium = medium
        publish(changes, event, BlockRemoved([1], medium))
    assert changes.take(1, 0, 9) is None


def test_a_cleared_cache_is_told_before_what_came_after() -> None:
    changes = CacheChanges(NullEventPublisher())
    publish(changes, stored(0, 1))
    changes.take(0, 0, 0)
    publish(changes, stored(0, 5), AllBlocksCleared(), stored(0, 1))
    told = changes.take(0, 0, 0)
    assert told.is_cleared
    assert (told.stored, told.removed) == ({0: [1]}, {})


def test_any_history_is_told_in_full() -> None:
    rng = random.Random(3)
    changes = CacheChanges(NullEventPublisher())
    counts: Counter[tuple[int, int]] = Counter()
    believed: set[tuple[int, int]] = set()
    for _ in range(300):
        for _ in range(rng.randrange(4)):
            group, short = rng.randrange(2), rng.randrange(8)
            if counts[group, short] and rng.random() < 0.5:
                counts[group, short] -= 1
                publish(changes, removed(group, short))
            else:
                counts[group, short] += 1
                publish(changes, stored(group, short))
        told = changes.take(0, 0, 0)
        if told is not None:
            believed -= {(g, h) for g, hashes in told.removed.items() for h in hashes}
            believed |= {(g, h) for g, hashes in told.stored.items() for h in hashes}
        assert believed == {key for key, number in counts.items() if number}


@pytest.mark.parametrize("block_hash", [b"\x01" * 40, int.from_bytes(b"\x01" * 8, "big")])
def test_hashes_are_short_in_either_spelling(block_hash: bytes | int) -> None:
    assert shorten(block_hash) == 0x0101010101010101


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_the_front_end_hashes_as_the_core_does(config, salt: str | None) -> None:
    base = config()
    base.parallel_config = type(base.parallel_config)(data_parallel_size=2)
    agreed = agree_on_hashes(base)
    core = build_fake_core(make_rank_config(agreed, 1))
    hash_prompt = make_prompt_hasher(agreed, 16)
    asked = request(prompt=range(50), max_tokens=1)
    asked = type(asked)(
        "r",
        asked.prompt_token_ids,
        asked.sampling_params,
        0.0,
        options=RequestOptions(cache_salt=salt),
    )
    hashes = list(hash_prompt(asked))
    assert len(hashes) == 3
    assert core.make_request(asked).block_hashes == hashes
    add(core, asked)
    run(core)
    told = core.take_status()
    assert set(told.stored[0]) == {shorten(h) for h in hashes}
    assert told.num_running == told.num_waiting == 0
    assert core.take_status() is None
