"""vllm/v1/kv_offload/lookups/ways.py: what there is, and the quickest of it."""

from collections.abc import Sequence

import pytest

from tests.v1.kv_offload.tier_rig import (
    GROUP,
    UNIT,
    WITH_STATES,
    make_request,
    make_store,
    rows_key,
)
from vllm.v1.kv_offload.lookups.rates import Rates
from vllm.v1.kv_offload.lookups.ways import (
    Located,
    Restorable,
    Tiers,
    Way,
    choose_way,
    find_restorable,
    find_ways,
)
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import Extent, ObjectKey, ObjectSpec, StoredObject

PROMPT = make_request("0", 4 * GROUP + 1)
HASHES = PROMPT.block_hashes


def _put(store: ObjectStore, key: ObjectKey, end: int, num_bytes: int) -> None:
    store.writer.commit(
        [r for r in store.reserve([ObjectSpec(key, end, num_bytes)]) if r is not None]
    )


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
    assert (len(host.state.entries.pins), len(disk.state.entries.pins)) == (1, 1)
    tiers.unpin(objects)
    assert (len(host.state.entries.pins), len(disk.state.entries.pins)) == (0, 0)
    gone = next(located for located in objects if not located.is_host)
    disk.report_corrupt(gone.found)
    assert not tiers.pin(objects)
    assert not host.state.entries.pins
    assert isinstance(gone, Located)


def _way(position: int, num_bytes: int, resumes_at: int, *, is_host: bool = False) -> Way:
    key = ObjectKey(ObjectKind.ROWS, bytes(16))
    entry = StoredObject(0, Extent(key, 1, num_bytes, ((0, 1),)), position, None)
    found = Restorable(position, (Located(entry, is_host),), ((0, position),), None)
    return Way(found, resumes_at)


def _rates(bytes_per_s: float = 1e9, tokens_per_s: float = 1e4) -> Rates:
    rates = Rates(bytes_per_s=bytes_per_s)
    rates.tokens_per_s = dict.fromkeys(range(20), tokens_per_s)
    return rates


WHOLE = _way(4096, 40_000_000, 4096)
ROWS = _way(7680, 50_000_000, 6912)
WIDE = _way(7680, 400_000_000, 6912)


@pytest.mark.parametrize(
    ("ways", "rates", "num_local", "expected"),
    [
        # Loading 40 MB takes 54 ms with its margin, 4,096 tokens 410.
        ([WHOLE], _rates(), 0, WHOLE),
        # Rows reach further, and cost 768 tokens less than they bring.
        ([WHOLE, ROWS], _rates(), 0, ROWS),
        # A slow disk: 40 MB take 5 s; computing all takes 0.8.
        ([WHOLE, ROWS], _rates(bytes_per_s=1e7), 0, None),
        # 360 MB more take longer than the 2,816 tokens that they bring.
        ([WHOLE, WIDE], _rates(), 0, WHOLE),
        # The pool has nearly as much.
        ([ROWS], _rates(), 6880, None),
        # Computing is not measured yet: what leaves least to compute.
        ([WHOLE, ROWS], Rates(), 0, ROWS),
        ([], _rates(), 0, None),
        ([], Rates(), 0, None),
    ],
)
def test_the_quickest_way_is_taken(ways, rates, num_local, expected):
    assert choose_way(ways, rates, num_local, 8000, 0) is expected


def test_what_is_read_before_counts_for_the_disk_alone():
    near = _way(7680, 50_000_000, 6912, is_host=True)
    queue = 10_000_000_000
    assert choose_way([ROWS], _rates(), 0, 8000, queue) is None
    assert choose_way([near], _rates(), 0, 8000, queue) is near
    assert choose_way([ROWS], _rates(), 0, 8000, queue, always=True) is ROWS


def test_rows_alone_are_told_from_a_state():
    assert ROWS.is_rows_alone
    assert not WHOLE.is_rows_alone
