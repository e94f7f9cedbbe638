"""vllm/distributed/kv_transfer/offloading/restoring.py: what there is; ways: ``test_ways.py``"""

from collections.abc import Sequence

import pytest

from tests.distributed.kv_transfer.offloading.tier_rig import (
    GROUP,
    UNIT,
    WITH_STATES,
    make_request,
    make_store,
    rows_key,
)
from vllm.distributed.kv_transfer.offloading.restoring import (
    Located,
    Restorable,
    Tiers,
    find_restorable,
    find_ways,
)
from vllm.v1.kv_offload.cells import ObjectKind
from vllm.v1.kv_offload.records import ObjectKey, ObjectSpec
from vllm.v1.kv_offload.store import ObjectStore

PROMPT = make_request("0", 4 * GROUP + 1)
HASHES = PROMPT.block_hashes


def _put(store: ObjectStore, key: ObjectKey, end: int, num_bytes: int) -> None:
    store.commit([r for r in store.reserve([ObjectSpec(key, end, num_bytes)]) if r is not None])


def _rows(ends: Sequence[int]) -> ObjectStore:
    store = make_store()
    for end in ends:
        size = WITH_STATES.object_bytes(ObjectKind.ROWS, end - GROUP, end)
        _put(store, rows_key(PROMPT, end), end, size)
    return store


def _put_state(store: ObjectStore, end: int, more: int = 0) -> None:
    size = WITH_STATES.object_bytes(ObjectKind.STATE, end // GROUP * GROUP, end) + more
    _put(store, ObjectKey.of(ObjectKind.STATE, HASHES[end // UNIT - 1]), end, size)


def test_the_deepest_state_over_unbroken_rows() -> None:
    store = _rows([GROUP, 2 * GROUP, 4 * GROUP])
    for end in (UNIT, 2 * GROUP + UNIT, 3 * GROUP + UNIT):
        _put_state(store, end)
    found = find_restorable(Tiers(None, store), WITH_STATES, HASHES, 0, 4 * GROUP)
    assert found is not None
    assert found.position == 2 * GROUP + UNIT
    assert found.spans == ((0, GROUP), (GROUP, 2 * GROUP), (2 * GROUP, 2 * GROUP + UNIT))


def test_a_state_of_another_size_is_none() -> None:
    store = _rows([GROUP])
    _put_state(store, UNIT)
    _put_state(store, GROUP, more=1)
    found = find_restorable(Tiers(None, store), WITH_STATES, HASHES, 0, 4 * GROUP)
    assert found is not None
    assert found.position == UNIT


@pytest.mark.parametrize(
    ("num_local", "rebuilt", "resumes_at"),
    [(0, UNIT, [GROUP]), (GROUP, UNIT, []), (0, GROUP + UNIT, [])],
)
def test_rows_alone_are_a_way_if_they_bring_more_than_the_pool_has(
    num_local: int, rebuilt: int, resumes_at: list[int]
) -> None:
    tiers = Tiers(None, _rows([GROUP]))
    ways = find_ways(tiers, WITH_STATES, HASHES, num_local, 4 * GROUP, rebuild_tokens=rebuilt)
    assert [way.resumes_at for way in ways] == [GROUP - UNIT for _ in resumes_at]


def test_tokens_are_counted_behind_the_local_hit() -> None:
    host, disk = _rows([GROUP]), _rows([GROUP, 2 * GROUP])
    objects = Tiers(host, disk).find([rows_key(PROMPT, end) for end in (GROUP, 2 * GROUP)])
    located = tuple(o for o in objects if o is not None)
    assert [o.is_host for o in located] == [True, False]
    spans = ((0, GROUP), (GROUP, 2 * GROUP))
    found = Restorable(2 * GROUP, located, spans, None)
    assert found.count_sources(0) == {"host": GROUP, "disk": GROUP}
    assert found.count_sources(UNIT) == {"host": GROUP - UNIT, "disk": GROUP}
    assert found.count_sources(GROUP) == {"disk": GROUP}


def test_all_objects_are_kept_or_none() -> None:
    host, disk = _rows([GROUP]), _rows([2 * GROUP])
    tiers = Tiers(host, disk)
    objects = [o for o in tiers.find([rows_key(PROMPT, e) for e in (GROUP, 2 * GROUP)]) if o]
    assert tiers.pin(objects)
    assert (len(host._pins), len(disk._pins)) == (1, 1)
    tiers.unpin(objects)
    assert (len(host._pins), len(disk._pins)) == (0, 0)
    gone = next(located for located in objects if not located.is_host)
    disk.report_corrupt(gone.found)
    assert not tiers.pin(objects)
    assert not host._pins
    assert isinstance(gone, Located)
