"""vllm/v1/kv_offload/tier.py, without an engine."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.v1.kv_offload.tier_rig import (
    GROUP,
    ROWS_BYTES,
    UNIT,
    WITH_STATES,
    WORKERS,
    TierRig,
    make_request,
    make_store,
    rows_key,
)
from vllm.v1.core.pool.exports import PlacedCheckpoint, PrefixBlocks
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.kv_offload.lookups.rates import Rates
from vllm.v1.kv_offload.orders import Moved, OffloadReport
from vllm.v1.kv_offload.restores import tier_restores
from vllm.v1.kv_offload.restores.warm_file import WARM_FILE, load_prefixes
from vllm.v1.kv_offload.writes import tier_writes
from vllm.v1.messages import RESTORE_DECLINED

PROMPT = 4 * GROUP + 1


def _spans(orders: Any) -> list[tuple[int, int]]:
    return [(order.first, order.end) for order in orders.writes]


# ---- writing -------------------------------------------------------------------------------------


def test_an_object_is_there_when_every_worker_has_written_it() -> None:
    rig = TierRig(make_store())
    request = rig.begin(make_request("0", PROMPT))
    orders = rig.step(request, 2 * GROUP + 5)
    assert _spans(orders) == [(0, GROUP), (GROUP, 2 * GROUP)]
    assert orders.folder == "folder"
    half = {order.disk.sequence: 1 for order in orders.writes if order.disk}
    rig.tier.take_report(OffloadReport(written=half))
    assert rig.tier.restores.find_tokens(make_request("1", PROMPT), 0) == 0
    rig.tier.take_report(OffloadReport(written=half))
    assert rig.tier.restores.find_tokens(make_request("1", PROMPT), 0) == 2 * GROUP
    # Each is considered once.
    assert _spans(rig.step(request, 3 * GROUP)) == [(2 * GROUP, 3 * GROUP)]


def test_the_rest_of_a_prompt_is_written_when_its_request_ends() -> None:
    rig = TierRig(make_store())
    request = rig.begin(make_request("0", GROUP + UNIT + 1))
    assert _spans(rig.step(request, request.num_tokens)) == [(0, GROUP)]
    rig.tier.end(request)
    assert rig.tier.has_pending_work()
    assert _spans(rig.step()) == [(GROUP, GROUP + UNIT)]


def test_what_the_pool_gave_up_meanwhile_is_dropped() -> None:
    rig = TierRig(make_store())
    rig.coordinator.lost = {GROUP}
    request = rig.begin(make_request("0", PROMPT))
    assert _spans(rig.step(request, 2 * GROUP)) == [(GROUP, 2 * GROUP)]
    assert rig.tier.reports.counts.stores["dropped"] == 1


def test_so_many_bytes_are_on_their_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "_MAX_QUEUED_BYTES", ROWS_BYTES + 1)
    rig = TierRig(make_store())
    orders = rig.step(rig.begin(make_request("0", PROMPT)), PROMPT)
    assert len(orders.writes) == 2
    assert rig.step().writes == []
    rig.settle(orders)
    assert _spans(rig.step()) == [(2 * GROUP, 3 * GROUP), (3 * GROUP, 4 * GROUP)]


def test_a_state_that_was_left_behind_while_it_waited_is_not_written() -> None:
    rig = TierRig(make_store(), layout=WITH_STATES)
    kept, left = CheckpointStanding.KEPT, CheckpointStanding.SUPERSEDED
    rig.coordinator.checkpoints = [PlacedCheckpoint(p, kept, None) for p in (UNIT, 3 * UNIT)]
    rig.coordinator.standing = {UNIT: left, 3 * UNIT: kept}
    request = rig.begin(make_request("0", 3 * UNIT))
    assert _spans(rig.step(request, 3 * UNIT)) == [(0, GROUP)]
    assert _spans(rig.step(request, 3 * UNIT + 1)) == [(GROUP, 3 * UNIT)]
    assert rig.tier.reports.counts.stores["superseded"] == 1


def test_a_budget_counts_the_bytes_of_all_workers() -> None:
    # What is left behind the first object would do for another one at one worker.
    rig = TierRig(make_store(), write_budget_per_day=2 * ROWS_BYTES * WORKERS - 1)
    orders = rig.step(rig.begin(make_request("0", PROMPT)), PROMPT)
    assert len(orders.writes) == 1
    assert rig.tier.reports.counts.stores["over_budget"] == 3


def test_a_full_folder_is_written_over_for_what_was_read_of_it() -> None:
    rig = TierRig(make_store(), max_bytes=4 * ROWS_BYTES * WORKERS)
    rig.keep(make_request("0", PROMPT))
    other = rig.begin(make_request("1", PROMPT, seed=1))
    assert rig.step(other, GROUP).writes == []
    assert rig.tier.reports.counts.stores["unproven"] == 1
    rig.tier.take_report(OffloadReport(read={"disk": Moved(ROWS_BYTES, 1.0)}))
    assert _spans(rig.step(other, 2 * GROUP)) == [(GROUP, 2 * GROUP)]


def test_what_the_disk_reads_in_host_memory_stays_there_until_then() -> None:
    host, disk = make_store(), make_store()
    rig = TierRig(disk, host)
    orders = rig.step(rig.begin(make_request("0", GROUP)), GROUP)
    to_host, to_disk = orders.writes
    assert to_host.disk is None
    assert to_disk.host == to_host.host
    assert to_disk.blocks is None
    assert list(host.state.entries.pins.values()) == [1]
    rig.settle(orders)
    assert not host.state.entries.pins


def test_who_finds_no_room_waits_for_it_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "_MAX_REFUSALS", 3)
    disk = make_store()
    rig = TierRig(disk)
    refuse = True
    reserve = disk.reserve
    monkeypatch.setattr(disk, "reserve", lambda s: [None] * len(s) if refuse else reserve(s))
    request = rig.begin(make_request("0", PROMPT))
    assert rig.step(request, 2 * GROUP).writes == []
    # Made before more are refused.
    assert disk.state.room._ahead > 0
    assert rig.step().writes == []
    refuse = False
    assert len(rig.step().writes) == 2
    # Nothing is left of those refusals: the next one has as many of its own.
    refuse = True
    assert rig.step(request, 3 * GROUP).writes == []
    assert rig.step().writes == []
    assert rig.tier.reports.counts.stores["no_room"] == 0
    assert rig.step().writes == []
    assert rig.tier.reports.counts.stores["no_room"] == 1
    assert not rig.tier.writes.gate.ready


@pytest.mark.parametrize("first_is_unsynced", [True, False])
def test_an_object_that_one_worker_could_not_write_is_lost(first_is_unsynced: bool) -> None:
    disk = make_store()
    rig = TierRig(disk)
    (order,) = rig.step(rig.begin(make_request("0", GROUP)), GROUP).writes
    assert order.disk is not None
    sequence = order.disk.sequence
    unsynced = frozenset({sequence}) if first_is_unsynced else frozenset()
    rig.tier.take_report(OffloadReport(unwritten={sequence: 1}, unsynced=unsynced))
    rig.tier.take_report(OffloadReport(unwritten={sequence: 1}))
    assert disk.contains([order.disk.key]) == [False]
    # After a failed sync nobody knows what its slots hold.
    assert len(disk.state._failures) == first_is_unsynced


@pytest.mark.parametrize("how", ["memory gets short", "the engine stops"])
def test_what_is_written_late(how: str) -> None:
    rig = TierRig(make_store(), write_policy="write_back")
    assert rig.step(rig.begin(make_request("0", PROMPT)), PROMPT).writes == []
    if how == "memory gets short":
        rig.pool.num_scratch_blocks = 12
    else:
        assert not rig.tier.has_pending_work()
        rig.tier.begin_drain()
        assert rig.tier.has_pending_work()
    assert len(rig.step().writes) == 4


# ---- restoring -----------------------------------------------------------------------------------


@pytest.fixture
def kept() -> TierRig:
    """A tier that has a prompt's rows on its disk."""
    rig = TierRig(make_store())
    rig.keep(make_request("0", PROMPT))
    return rig


def test_who_does_not_read_the_cache_does_not_read_the_disk(kept: TierRig) -> None:
    assert kept.tier.restores.find_tokens(make_request("1", PROMPT, prompt_logprobs=1), 0) == 0


def test_a_restore_keeps_its_objects_and_is_awaited_by_others(kept: TierRig) -> None:
    disk = kept.keeper.store if kept.keeper else None
    assert disk is not None
    assert kept.restore(make_request("1", PROMPT)) == 4 * GROUP
    assert len(disk.state.entries.pins) == 4
    assert kept.tier.restores.find_tokens(make_request("2", PROMPT), 0) is None
    (order,) = kept.step().restores
    assert [(o.first, o.end) for o in order.objects][-1] == (3 * GROUP, 4 * GROUP)
    assert kept.tier.has_pending_work()
    kept.tier.settle("1", has_failed=False)
    assert not disk.state.entries.pins
    assert not kept.tier.has_pending_work()
    assert kept.tier.restores.find_tokens(make_request("2", PROMPT), GROUP) == 3 * GROUP


def test_two_failures_are_enough_for_a_prompt(kept: TierRig) -> None:
    request = make_request("1", PROMPT)
    for _ in range(2):
        assert kept.restore(request) == 4 * GROUP
        kept.tier.settle("1", has_failed=True)
    assert kept.restore(request) == 0
    # Its end, and another's success, leave nothing of that.
    kept.tier.end(request)
    for _ in range(3):
        assert kept.restore(request) == 4 * GROUP
        kept.tier.settle("1", has_failed=False)


def test_restores_are_few_at_a_time() -> None:
    rig = TierRig(make_store())
    for seed in range(5):
        rig.keep(make_request(f"k{seed}", GROUP + 1, seed))
    requests = [make_request(f"{seed}", GROUP + 1, seed) for seed in range(5)]
    assert [rig.restore(request) for request in requests] == [*[GROUP] * 4, None]
    rig.tier.settle("0", has_failed=False)
    assert rig.restore(requests[4]) == GROUP


_BLOCKS = PrefixBlocks(4 * GROUP, 0, (0,), ((1,),), None)


def test_rows_without_a_state_are_loaded_for_nobody_and_not_for_ever() -> None:
    rig = TierRig(make_store(), layout=WITH_STATES)
    rig.coordinator.rebuild_tokens = UNIT
    rig.keep(make_request("0", PROMPT))
    loads = Mock(is_loading=Mock(return_value=False), begin=Mock(return_value=_BLOCKS))
    rig.tier.restores._own_loads = loads
    request = make_request("1", PROMPT)
    for _ in range(2):
        # It is looked up anew when they are there.
        assert rig.tier.restores.find_tokens(request, 0) is None
        rig.tier.restores.settle("rows of 1", has_failed=True)
    assert [call.args[2] for call in loads.begin.mock_calls] == [4 * GROUP] * 2
    assert rig.tier.restores.find_tokens(request, 0) == 0
    other = make_request("2", PROMPT)
    loads.begin.return_value = None
    assert rig.tier.restores.find_tokens(other, 0) == 0
    loads.is_loading.return_value = True
    assert rig.tier.restores.find_tokens(other, 0) is None
    assert len(loads.begin.mock_calls) == 3


def test_a_request_waits_for_a_folder_that_opens_but_not_for_ever(
    kept: TierRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(tier_restores, "time", SimpleNamespace(monotonic=lambda: now))
    assert kept.keeper is not None
    kept.keeper.is_opening = True
    request = make_request("1", PROMPT)
    assert kept.tier.restores.find_tokens(request, 0) is None
    now = 31.0
    assert kept.tier.restores.find_tokens(request, 0) == 0
    # The next one of its name has time of its own.
    kept.tier.end(request)
    assert kept.tier.restores.find_tokens(request, 0) is None


def test_a_restore_ends_with_its_request(kept: TierRig) -> None:
    request = kept.begin(make_request("1", PROMPT))
    kept.restore(request)
    kept.step()
    kept.tier.end(request)
    assert kept.step().cancelled == ["1"]


def test_why_nothing_was_restored_is_told_in_its_step_alone(kept: TierRig) -> None:
    kept.tier._settings.always_restore = False  # type: ignore[misc]  # the rig's, which is plain
    kept.tier.stores._rates = Rates(bytes_per_s=1.0, tokens_per_s={0: 1e12})
    request = make_request("1", PROMPT)
    assert kept.tier.restores.find_tokens(request, 0) == 0
    note = kept.tier.explain_admission(request)
    assert note is not None
    assert (note.miss_reason, note.miss_until) == (RESTORE_DECLINED, 4 * GROUP)
    assert kept.tier.reports.counts.restores["declined"] == 1
    assert kept.tier.restores.find_tokens(request, 0) == 0
    kept.step()
    assert kept.tier.explain_admission(request) is None


def test_what_other_restores_read_before_counts() -> None:
    rig = TierRig(make_store(), always_restore=False)
    for seed in range(2):
        rig.keep(make_request(f"k{seed}", GROUP + 1, seed))
    # Alone a restore takes 1.25 s of the 1.6 that computing takes; behind another one twice that.
    rig.tier.stores._rates = Rates(bytes_per_s=ROWS_BYTES, tokens_per_s={0: GROUP / 1.6})
    assert rig.restore(make_request("0", GROUP + 1, 0)) == GROUP
    assert rig.restore(make_request("1", GROUP + 1, 1)) == 0


def test_bytes_that_are_not_the_ones_written_are_forgotten(kept: TierRig) -> None:
    request = make_request("1", PROMPT)
    kept.restore(request)
    (order,) = kept.step().restores
    bad = order.objects[1].extent
    kept.tier.take_report(OffloadReport(corrupt=frozenset({(False, bad.sequence)})))
    kept.tier.settle("1", has_failed=True)
    assert kept.tier.reports.counts.num_corrupt == 1
    assert kept.restore(request) == GROUP


def test_a_disk_that_fails_to_read_is_left_alone_for_a_while(kept: TierRig) -> None:
    kept.tier.take_report(OffloadReport(num_failed_reads=7))
    assert kept.tier.restores.find_tokens(make_request("1", PROMPT), 0) == 4 * GROUP
    kept.tier.take_report(OffloadReport(num_failed_reads=1))
    assert kept.tier.restores.find_tokens(make_request("1", PROMPT), 0) == 0
    kept.now += 61
    assert kept.tier.restores.find_tokens(make_request("1", PROMPT), 0) == 4 * GROUP


@pytest.mark.parametrize("has_failed", [True, False])
def test_what_came_from_the_disk_stays_in_host_memory(has_failed: bool) -> None:
    disk = make_store()
    TierRig(disk).keep(make_request("0", PROMPT))
    host = make_store()
    rig = TierRig(disk, host)
    request = make_request("1", PROMPT)
    assert rig.restore(request) == 4 * GROUP
    (order,) = rig.step().restores
    assert all(o.keep is not None and not o.is_host for o in order.objects)
    rig.tier.settle("1", has_failed=has_failed)
    assert host.contains([rows_key(request, GROUP)]) == [not has_failed]


# ---- a reset, an end, a start --------------------------------------------------------------------


@pytest.mark.parametrize("has_host", [True, False])
@pytest.mark.parametrize("is_opening", [True, False])
def test_a_reset_forgets_what_is_kept_and_what_waits_for_it(
    is_opening: bool, has_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_writes, "_MAX_QUEUED_BYTES", 1)
    disk, host = make_store(), make_store() if has_host else None
    rig = TierRig(disk, host)
    assert rig.keeper is not None
    rig.keeper.is_opening = is_opening
    orders = rig.step(rig.begin(make_request("0", PROMPT)), PROMPT)
    rig.keeper.is_opening = False
    assert rig.tier.reset()
    rig.settle(orders)
    assert rig.step().writes == []
    key = rows_key(make_request("0", PROMPT), GROUP)
    assert all(store.find([key]) == [None] for store in (disk, host) if store is not None)


def test_the_next_start_knows_what_was_used() -> None:
    small: dict[str, bytes] = {}
    rig = TierRig(make_store(), small=small, warm=4)
    rig.keep(make_request("0", PROMPT))
    rig.tier.close()
    assert len(load_prefixes(small[WARM_FILE], rig.now)) == 1
    rig.tier.reset()
    rig.tier.close()
    assert load_prefixes(small[WARM_FILE], rig.now) == []


def test_a_restart_does_not_renew_a_budget() -> None:
    small: dict[str, bytes] = {}
    budget = 4 * ROWS_BYTES * WORKERS
    first = TierRig(make_store(), small=small, write_budget_per_day=budget)
    first.step(first.begin(make_request("0", PROMPT)), 3 * GROUP)
    first.tier.close()
    second = TierRig(make_store(), small=small, write_budget_per_day=budget)
    assert second.tier.writes.gate.budget.allows(ROWS_BYTES * WORKERS)
    assert not second.tier.writes.gate.budget.allows(ROWS_BYTES * WORKERS + 1)


def test_a_reset_before_the_folder_is_open_says_that_the_disk_is_not_clear(kept: TierRig) -> None:
    assert kept.keeper is not None
    kept.keeper.is_opening = True
    assert not kept.tier.reset()
    kept.keeper.is_opening = False
    assert kept.tier.reset()
    assert kept.restore(make_request("1", PROMPT)) == 0
