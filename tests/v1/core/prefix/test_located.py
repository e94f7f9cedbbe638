"""Where cached rows lie, for those who keep prefixes elsewhere."""

import pytest

from tests.v1.core.pool.test_exports import UNIT, compute, make_manager
from tests.v1.core.unit_cache_driver import coordinator_of, make_request
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

END = 288  # the last boundary of 300 tokens


@pytest.fixture
def computed() -> tuple[KVCacheManager, CheckpointCoordinator, Request]:
    manager = make_manager()
    request = make_request("a", range(300), UNIT)
    compute(manager, request)
    return manager, coordinator_of(manager), request


def test_what_resuming_takes_is_what_another_engine_is_sent(
    computed: tuple[KVCacheManager, CheckpointCoordinator, Request],
) -> None:
    manager, coordinator, request = computed
    exported = manager.export_prefix("lease", request)
    assert exported is not None
    assert exported.num_tokens == END
    assert exported.next_token == END
    assert coordinator.locate_checkpoint(request.block_hashes, END, 0) == exported


@pytest.mark.parametrize("first", range(0, END, UNIT))
@pytest.mark.parametrize("end", [32, 64, 128, 160, 256, END])
def test_dense_rows_lie_in_the_blocks_that_hold_them(
    computed: tuple[KVCacheManager, CheckpointCoordinator, Request], first: int, end: int
) -> None:
    manager, coordinator, request = computed
    if first >= end:
        return
    found = coordinator.locate_rows(request.block_hashes, first, end)
    assert found is not None
    assert (found.num_tokens, found.dense_from, found.next_token) == (end, first, None)
    tables = manager.get_block_ids("a")
    for group in coordinator.geometry.groups:
        base, ids = found.bases[group.group_id], found.block_ids[group.group_id]
        if group.is_window:
            assert (base, ids) == (0, ())
            continue
        # The rows that complete in [first, end), each of ``ratio`` tokens.
        rows = range(first // group.ratio, end // group.ratio)
        blocks = sorted({row * group.ratio // group.block_size for row in rows})
        assert base == first // group.ratio * group.ratio // group.block_size
        assert list(ids) == [tables[group.group_id][i] for i in blocks]


def test_what_is_not_cached_lies_nowhere(
    computed: tuple[KVCacheManager, CheckpointCoordinator, Request],
) -> None:
    manager, coordinator, request = computed
    longer = make_request("b", range(400), UNIT)
    assert coordinator.locate_rows(longer.block_hashes, 0, END + UNIT) is None
    assert coordinator.locate_rows(longer.block_hashes, 0, END) is not None
    assert coordinator.locate_checkpoint(longer.block_hashes, 64, 0) is None
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert coordinator.locate_rows(longer.block_hashes, 0, END) is None


def test_checkpoints_are_listed_up_to_an_end_the_first_one_first(
    computed: tuple[KVCacheManager, CheckpointCoordinator, Request],
) -> None:
    _, coordinator, request = computed
    kept = coordinator.index.checkpoints.values()
    positions = sorted(record.position for record in kept)
    assert positions[-1] == END
    assert len(positions) > 1
    for end in (0, positions[0] - 1, positions[0], END - 1, END):
        placed = coordinator.list_checkpoints(request.block_hashes, end)
        assert [one.position for one in placed] == [p for p in positions if p <= end]
        # The prompt counts from 0, so the token after a boundary is the boundary.
        assert all(one.next_token == one.position for one in placed)
