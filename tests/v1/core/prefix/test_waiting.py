"""Waiting for a running prefill, and what the donor leaves for who waits."""

import random

import pytest

from benchmarks.policies import VariantPolicy
from tests.v1.core.unit_cache_driver import coordinator_of, make_manager, make_request
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.retention.donors import max_wait_steps
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.values.cache_step import Lookup
from vllm.v1.request import Request

UNIT = 32


def tokens_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def prompts(shared: int, first: int = 300, second: int = 100) -> tuple[Request, Request]:
    """Two prompts that part after ``shared`` tokens."""
    common = tokens_of(1, shared)
    return (
        make_request("donor", [*common, *tokens_of(2, first)], UNIT),
        make_request("follower", [*common, *tokens_of(3, second)], UNIT),
    )


def scheduled(donor: Request, num_tokens: int, num_blocks: int = 400) -> KVCacheManager:
    """A manager in the midst of a step that schedules a donor's first tokens."""
    config = v4_config(UNIT, num_blocks)
    geometry = CacheGeometry.from_config(config)
    policy = VariantPolicy(geometry, "ends only", keeps_lean=False, keeps_coarse=False)
    manager = make_manager(config, 2048, policy=policy)
    manager.new_step_starts()
    assert manager.allocate_slots(donor, num_tokens) is not None
    return manager


def waits(manager: KVCacheManager, request: Request) -> bool:
    return manager.should_wait(request, manager.look_up(request))


def test_the_donor_leaves_a_checkpoint_inside_the_chunk_it_is_at() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, donor.num_tokens)
    assert waits(manager, follower)
    # Asked again, it does not take blocks again.
    num_free = manager.block_pool.get_num_free_blocks()
    assert waits(manager, follower)
    assert manager.block_pool.get_num_free_blocks() == num_free
    manager.coordinator.commit_step()
    at_junction = coordinator_of(manager).store.get(follower.block_hashes[480 // UNIT - 1])
    assert at_junction is not None
    assert at_junction.standing is CheckpointStanding.JUNCTION
    assert manager.look_up(follower).num_tokens == 480
    assert not waits(manager, follower)
    donor.num_computed_tokens = donor.num_tokens
    manager.check_invariants({"donor": donor.num_tokens})


def test_a_follower_without_room_has_its_checkpoint_left_too() -> None:
    """The donor's chunk takes the whole step: who shares a place in it is not looked up."""
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, donor.num_tokens)
    manager.announce(follower)
    manager.coordinator.commit_step()
    assert manager.look_up(follower).num_tokens == 480


@pytest.mark.parametrize(("shared", "num_tokens"), [(500, 100), (20, 800), (0, 800)])
def test_an_announcement_is_for_places_inside_the_chunk(shared: int, num_tokens: int) -> None:
    donor, follower = prompts(shared)
    manager = scheduled(donor, min(num_tokens, donor.num_tokens))
    before = coordinator_of(manager).requests["donor"].pending.boundaries
    manager.announce(follower)
    assert coordinator_of(manager).requests["donor"].pending.boundaries == before


def test_without_a_follower_the_donor_leaves_nothing_there() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, donor.num_tokens)
    manager.coordinator.commit_step()
    assert manager.look_up(follower).num_tokens == 0


def test_a_later_chunk_leaves_the_checkpoint_too() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, 256)
    assert waits(manager, follower)
    pending = coordinator_of(manager).requests["donor"].pending
    assert max(pending.boundaries, default=0) <= 256
    manager.coordinator.commit_step()
    donor.num_computed_tokens = 256
    manager.new_step_starts()
    assert manager.allocate_slots(donor, donor.num_tokens - 256) is not None
    manager.coordinator.commit_step()
    assert manager.look_up(follower).num_tokens == 480


def test_a_chunk_that_ends_where_they_part_leaves_it_at_its_end() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, 480)
    assert waits(manager, follower)
    assert 480 in coordinator_of(manager).requests["donor"].pending.boundaries


@pytest.mark.parametrize("start", [384, 448])
def test_a_chunk_leaves_nothing_at_its_start_or_before(start: int) -> None:
    """The lean boundary below where they part, 384, is not this chunk's to leave any more."""
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, start)
    manager.coordinator.commit_step()
    donor.num_computed_tokens = start
    manager.new_step_starts()
    assert manager.allocate_slots(donor, donor.num_tokens - start) is not None
    coordinator = coordinator_of(manager)
    before = set(coordinator.requests["donor"].pending.boundaries)
    # As if the first chunk's checkpoints were gone again, its dense rows not: worth a wait.
    found = manager.look_up(follower)._replace(num_tokens=0)
    assert manager.should_wait(follower, found)
    assert set(coordinator.requests["donor"].pending.boundaries) - before == {480}
    manager.coordinator.commit_step()
    donor.num_computed_tokens = donor.num_tokens
    manager.check_invariants({"donor": donor.num_tokens})


def test_without_room_for_it_the_checkpoint_is_left_out() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, donor.num_tokens)
    pool = manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert waits(manager, follower)
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(taken)
    manager.coordinator.commit_step()
    assert manager.look_up(follower).num_tokens == 0
    manager.check_invariants()


def test_waiting_ends_with_the_deadline_of_its_gain() -> None:
    donor, follower = prompts(shared=1000)
    manager = scheduled(donor, 64)
    num_waited = 0
    while waits(manager, follower):
        num_waited += 1
        manager.new_step_starts()
    assert num_waited == max_wait_steps(1000 // UNIT * UNIT)


def test_little_in_common_is_not_worth_a_step() -> None:
    for shared, is_worth_it in ((127, False), (128, True)):
        donor, follower = prompts(shared)
        assert waits(scheduled(donor, 64), follower) is is_worth_it


@pytest.mark.parametrize("shared", [32, 63, 64, 100, 127])
def test_rows_of_this_very_step_are_waited_for_however_few(shared: int) -> None:
    """The step is made anyway; who enters behind it computes fewer tokens."""
    donor, follower = prompts(shared)
    manager = scheduled(donor, 160)
    assert waits(manager, follower)
    manager.coordinator.commit_step()
    donor.num_computed_tokens = 160
    manager.new_step_starts()
    assert manager.look_up(follower).num_tokens == shared // UNIT * UNIT
    assert not waits(manager, follower)


def test_a_small_rest_behind_a_donors_chunk_is_waited_for_too() -> None:
    """Chunks may be smaller than a prompt: the last rows that both share are few."""
    donor, follower = prompts(shared=340)
    manager = scheduled(donor, 256)
    assert waits(manager, follower)
    manager.coordinator.commit_step()
    donor.num_computed_tokens = 256
    manager.new_step_starts()
    assert manager.look_up(follower).num_tokens == 256
    assert manager.allocate_slots(donor, 256) is not None
    assert waits(manager, follower)
    manager.coordinator.commit_step()
    assert manager.look_up(follower).num_tokens == 320


def test_a_finished_or_gone_prefill_is_not_waited_for() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, 256)
    assert waits(manager, follower)
    assert follower.request_id in coordinator_of(manager).requests
    manager.free(donor)
    assert not waits(manager, follower)
    # Nothing is remembered of who does not wait any more.
    assert follower.request_id not in coordinator_of(manager).requests


def test_nobody_waits_without_a_lookup() -> None:
    donor, follower = prompts(shared=500)
    manager = scheduled(donor, 256)
    assert not manager.should_wait(follower, Lookup(manager.empty_kv_cache_blocks))


@pytest.mark.parametrize(("num_prompt_tokens", "is_worth_it"), [(64, False), (400, True)])
def test_only_a_donors_prompt_is_waited_for(num_prompt_tokens: int, is_worth_it: bool) -> None:
    """One that was preempted computes its answer again, which nobody counts on."""
    common = tokens_of(1, 400)
    donor = make_request("donor", common[:num_prompt_tokens], UNIT, max_tokens=600)
    for token in common[num_prompt_tokens:]:
        donor.append_output_token_ids(token)
    manager = scheduled(donor, 32)
    assert len(donor.block_hashes) == 400 // UNIT
    follower = make_request("follower", [*common, *tokens_of(3, 100)], UNIT)
    assert waits(manager, follower) is is_worth_it
