"""A drafter's row that depends on the next token, and what drafts may leave behind."""

import random
from dataclasses import replace

import pytest

from tests.v1.core.unit_cache_driver import Driver, coordinator_of, make_request
from tests.v1.core.unit_cache_driver import make_manager as make_unit_manager
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefix.drafter_rows import can_rebuild
from vllm.v1.core.values.cache_settings import StaleRow
from vllm.v1.core.values.hit import Checkpoint
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

UNIT = 32
MAX_LEN = 2000


def drafter_config(num_blocks: int = 600) -> KVCacheConfig:
    """The groups of a small DeepSeek-V4 whose MTP block runs."""
    config = v4_config(UNIT, num_blocks)
    groups = [
        replace(group, is_eagle_group="mtp.0.attn.window" in group.layer_names)
        for group in config.kv_cache_groups
    ]
    assert sum(group.is_eagle_group for group in groups) == 1
    return replace(config, kv_cache_groups=groups)


def make_manager(stale_row: StaleRow = StaleRow.REBUILD) -> KVCacheManager:
    return make_unit_manager(drafter_config(), MAX_LEN, num_lookahead_tokens=3, stale_row=stale_row)


class Steps:
    """Runs requests alone, draft by draft."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.copies: list[tuple[int, int]] = []
        self.rebuilds: dict[str, int] = {}

    def prefill(self, request: Request) -> int:
        """Compute a prompt; returns its hit."""
        self.manager.new_step_starts()
        found = self.manager.look_up(request)
        hit = found.num_tokens
        num_new = request.num_tokens - hit
        assert self.manager.allocate_slots(request, num_new, hit, found.blocks)
        self.record = self.manager.record_admission(request, found, hit)
        request.start_running(hit)
        self.end(request, request.num_tokens - hit)
        return hit

    def decode(self, request: Request, tokens: list[int], num_drafts: int) -> None:
        """Append the tokens of the last step, verify drafts behind them."""
        request.append_output_token_ids(tokens)
        self.manager.new_step_starts()
        num_new = request.num_tokens - request.num_computed_tokens + num_drafts
        assert self.manager.allocate_slots(request, num_new, num_lookahead_tokens=3)
        self.end(request, num_new)

    def end(self, request: Request, num_tokens: int) -> None:
        self.manager.coordinator.commit_step()
        work = self.manager.take_step_work()
        self.copies, self.rebuilds = work.copies, work.drafter_rebuilds
        request.advance(num_tokens)
        accepted = min(request.num_computed_tokens, request.num_tokens)
        self.manager.check_invariants({request.request_id: accepted})


def checkpoint_at(manager: KVCacheManager, position: int) -> Checkpoint:
    records = coordinator_of(manager).index.checkpoints.values()
    (record,) = (r for r in records if r.position == position)
    return record


def published(manager: KVCacheManager) -> set[int]:
    return {record.position for record in coordinator_of(manager).index.checkpoints.values()}


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_a_boundary_is_published_when_its_last_token_is_accepted(num_accepted: int) -> None:
    manager = make_manager()
    steps = Steps(manager)
    request = make_request("r", range(126), UNIT)
    steps.prefill(request)
    assert 128 not in published(manager)
    # Tokens 126 (known) and 127..129 (drafts) are computed.
    steps.decode(request, [7], 3)
    assert request.num_computed_tokens == 130
    assert 128 not in published(manager), "drafts may be wrong"
    request.reject_drafts(3 - num_accepted)
    steps.decode(request, [7] * (1 + num_accepted), 0)
    # One token known and computed more: 128 is complete if any draft was accepted, or now.
    assert 128 in published(manager)
    record = checkpoint_at(manager, 128)
    assert record.next_token == (7 if num_accepted else None)
    manager.free(request)


@pytest.mark.parametrize(("num_accepted", "position"), [(0, 96), (1, 128), (3, 128)])
def test_what_drafts_completed_is_published_at_the_end(num_accepted: int, position: int) -> None:
    manager = make_manager()
    steps = Steps(manager)
    request = make_request("r", range(126), UNIT)
    steps.prefill(request)
    steps.decode(request, [7], 3)
    request.reject_drafts(3 - num_accepted)
    request.append_output_token_ids([7] * (1 + num_accepted))
    manager.free(request)
    assert max(published(manager)) == position
    again = make_request("s", [*range(126), 7, 7, 7, 7, 7], UNIT)
    assert steps.prefill(again) == position


def test_tokens_behind_a_stop_are_not_published() -> None:
    manager = make_manager()
    steps = Steps(manager)
    request = make_request("r", range(126), UNIT)
    steps.prefill(request)
    steps.decode(request, [7], 3)
    # All drafts were right, but the first of them ended the answer: 127 tokens and no more.
    manager.free(request)
    assert max(published(manager)) == 96


def test_windows_are_freed_up_to_accepted_tokens_only() -> None:
    manager = make_manager()
    steps = Steps(manager)
    request = make_request("r", range(254), UNIT)
    steps.prefill(request)
    # Were the drafts at 255..257 right, going on at 258 would free C128's state below 256.
    steps.decode(request, [7], 3)
    for table in coordinator_of(manager).requests["r"].windows:
        first = table.geometry.first_needed(254) // table.geometry.block_size
        assert table.base <= first
    request.reject_drafts(3)
    steps.decode(request, [7], 3)
    manager.free(request)


def test_the_next_token_is_noted_when_it_is_known() -> None:
    manager = make_manager()
    steps = Steps(manager)
    request = make_request("r", range(128), UNIT)
    steps.prefill(request)
    record = checkpoint_at(manager, 128)
    assert record.next_token is None
    steps.decode(request, [9], 0)
    assert record.next_token == 9
    manager.free(request)


@pytest.mark.parametrize("stale_row", list(StaleRow))
@pytest.mark.parametrize("next_token", [128, 5])
def test_a_hit_whose_next_token_differs(stale_row: StaleRow, next_token: int) -> None:
    manager = make_manager(stale_row)
    steps = Steps(manager)
    first = make_request("r", range(160), UNIT)
    steps.prefill(first)
    manager.free(first)
    steps.manager.new_step_starts()
    # 128 is the lean boundary of the last one at or below 159.
    parted = make_request("s", [*range(128), next_token, 6, 7], UNIT)
    hit = steps.prefill(parted)
    stats = steps.record
    assert stats.num_cached_tokens + sum(stats.miss_tokens.values()) == 131
    is_stale = next_token != 128
    if is_stale and stale_row is StaleRow.DROP:
        assert hit == 0
        assert stats.miss_tokens["drafter"] == 128
        assert not steps.copies
    else:
        assert hit == 128
        assert "drafter" not in stats.miss_tokens
        assert len(steps.rebuilds) == (is_stale and stale_row is StaleRow.REBUILD)
    if steps.rebuilds:
        windows = coordinator_of(manager).requests["s"].windows
        (index,) = (i for i, w in enumerate(windows) if w.geometry.has_drafter_rows)
        record = checkpoint_at(manager, 128)
        shared, private = record.blocks[index][-1], windows[index].blocks[-2]
        pairs = [pair for pair in steps.copies if pair[0] == shared.block_id]
        assert steps.rebuilds == {"s": shared.block_id}
        assert pairs == [(shared.block_id, private.block_id)]
        assert private.ref_cnt == 2, "held by the table and the copy"
    manager.free(parted)
    manager.new_step_starts()
    assert manager.usage == 0
    manager.check_invariants({})


def test_what_a_checkpoint_must_hold_for_a_rebuild() -> None:
    window = GroupGeometry(0, True, 32, keep=127, has_drafter_rows=True)
    assert all(can_rebuild(window, position) for position in range(32, 2000, 32))
    assert not can_rebuild(replace(window, has_drafter_rows=False), 128)
    # Row P - 1 reads row P - 41, which stands in the block before that of P - 40.
    short = replace(window, keep=40, block_size=8)
    assert not can_rebuild(short, 64)
    assert can_rebuild(replace(short, keep=39), 64)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_with_rebuilt_rows(seed: int) -> None:
    """I1 to I7, rows included, when many hits end where continuations part."""
    driver = Driver(drafter_config(num_blocks=260), 700, seed)
    rng = random.Random(seed)
    base = [rng.randrange(50) for _ in range(400)]
    for _ in range(40):
        cut = rng.randrange(1, 12) * UNIT
        driver.add([*base[:cut], *(rng.randrange(50) for _ in range(rng.randrange(1, 80)))])
        for _ in range(rng.randrange(5)):
            driver.step(rng.choice([64, 256]))
    driver.run_all()
    assert sum(driver.hits.values()) > 0
    assert driver.num_rebuilds > 3, "no hit ended where continuations part"


def test_a_preempted_request_leaves_no_order_behind() -> None:
    manager = make_manager()
    steps = Steps(manager)
    first = make_request("r", range(160), UNIT)
    steps.prefill(first)
    manager.free(first)
    manager.new_step_starts()
    parted = make_request("s", [*range(128), 1, 6, 7], UNIT)
    found = manager.look_up(parted)
    assert manager.allocate_slots(parted, 3, found.num_tokens, found.blocks)
    manager.free(parted)
    manager.coordinator.commit_step()
    work = manager.take_step_work()
    assert work.drafter_rebuilds == {}
    assert work.copies == []
    manager.check_invariants({})
