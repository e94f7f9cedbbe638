"""A recurrent state as a cache kind: grouped, allocated, hit, copied and announced like others.

Its spec is one class in ``toy_kind.py``. Nothing in the product knows it.
"""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.prefix_driver import PrefixDriver
from tests.v1.core.many_seeds import Traffic, run_random_traffic, tokens_of
from tests.v1.core.sched.test_state_machine import UnitTraffic, run_traffic
from tests.v1.core.toy_kind import RecurrentStateSpec, toy_config, toy_specs
from tests.v1.core.unit_cache_driver import (
    Driver,
    RowMemory,
    coordinator_of,
    make_manager,
    make_request,
)
from vllm.distributed.kv_events import BlockStored
from vllm.exceptions import ConfigError
from vllm.utils.hashing import sha256
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, maybe_convert_block_hash
from vllm.v1.core.layout.packing import packed_block_stride
from vllm.v1.core.retention.sizes import max_window_blocks
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.engine.kv_cache_setup import has_windows
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

PIECES = [1, 4, 18]


def state_blocks(driver: Driver, request_id: str) -> list[set[int]]:
    """Return by group the blocks of states that a request holds."""
    windows = driver.coordinator.requests[request_id].windows
    return [{block.block_id for block in w.blocks if not block.is_null} for w in windows]


@pytest.mark.parametrize("pieces", PIECES)
def test_what_is_needed_is_the_state_behind_the_last_token(pieces: int) -> None:
    geometry = CacheGeometry.from_config(toy_config(32, 50, pieces))
    assert geometry.lean == 32
    assert geometry.rebuild_tokens is None, "a state cannot be computed from some tokens before it"
    for group in geometry.windows:
        assert group.rows_below(0) == range(0)
        for position in range(1, 200):
            span = (position - 1) // 32
            read = range(span * pieces, (span + 1) * pieces)
            assert group.rows_below(position) == read
            # What the next token writes: the same blocks, but for a new span.
            written = group.block_range(position, position + 1)
            assert written == (read if position % 32 else range(read.stop, read.stop + pieces))
        assert max_window_blocks(geometry, group, 0) % pieces == 0


@pytest.mark.parametrize("pieces", PIECES)
def test_states_widen_no_row_of_the_pool(pieces: int) -> None:
    """The page of a piece is that of an attention layer, so three groups share its two columns."""
    groups = toy_config(32, 50, pieces).kv_cache_groups
    assert [len(group.layer_names) for group in groups] == [2, 2, 2, 2]
    labels = [group.kv_cache_spec.label for group in groups]
    assert labels == ["full attention", *["recurrent state"] * 3]
    assert packed_block_stride(groups) == packed_block_stride(groups[:1])
    assert has_windows(groups)
    spec = groups[1].kv_cache_spec
    assert spec.page_layout().num_bytes == spec.page_size_bytes


def test_the_engine_takes_a_kind_that_nothing_is_registered_for() -> None:
    """Hits at one unit need no manager of a group."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry(toy_specs(32, 4))


def test_a_state_that_ends_between_boundaries_is_refused() -> None:
    spec = RecurrentStateSpec(block_size=64, num_values=64, num_pieces=4, dtype=None)
    with pytest.raises(ConfigError, match="blocks of 64 tokens"):
        spec.geometry(0, 32)


@pytest.mark.parametrize("pieces", PIECES)
def test_a_request_holds_two_states_and_copies_none(pieces: int) -> None:
    driver = Driver(toy_config(32, 1000, pieces), 2048, seed=1)
    request = driver.add(tokens_of(1, 40), max_tokens=100)
    most = 0
    while driver.waiting or driver.running:
        driver.step()
        if request in driver.running:
            most = max(most, *map(len, state_blocks(driver, request.request_id)))
    assert most == 2 * pieces
    assert driver.num_copies == 0


@pytest.mark.parametrize("pieces", PIECES)
def test_a_resend_resumes_at_the_deepest_state_and_writes_another(pieces: int) -> None:
    driver = Driver(toy_config(32, 1000, pieces), 2048, seed=2)
    prompt = tokens_of(2, 230)
    driver.add(prompt, max_tokens=3)
    driver.run_all()
    again = driver.add(prompt, max_tokens=40)
    driver.step()
    assert driver.hits[again.request_id] == 224
    record = driver.coordinator.index.checkpoints[again.block_hashes[6]]
    shared = [{block.block_id for block in blocks} for blocks in record.blocks]
    assert [len(blocks) for blocks in shared] == [pieces] * 3
    for resumed, held in zip(shared, state_blocks(driver, again.request_id), strict=True):
        assert resumed < held
    # Within two steps it has given the checkpoint's state back, which it never wrote (I6).
    driver.step()
    driver.step()
    for resumed, held in zip(shared, state_blocks(driver, again.request_id), strict=True):
        assert not resumed & held
    driver.run_all()
    assert driver.coordinator.index.holds_checkpoint(record)
    third = driver.add([*driver.finished[again.request_id], *tokens_of(3, 50)], max_tokens=2)
    driver.run_all()
    # The answer's last full unit.
    assert driver.hits[third.request_id] == (270 - 1) // 32 * 32


def test_a_hit_inside_a_block_of_attention_copies_that_block_and_no_state() -> None:
    driver = Driver(toy_config(32, 400), 2048, seed=2)
    prompt = tokens_of(2, 230)
    driver.add(prompt, max_tokens=60)
    driver.run_all()
    driver.add(prompt, max_tokens=2)
    driver.run_all()
    assert driver.num_copies == 1


def test_states_are_left_inside_a_chunk_where_prompts_part() -> None:
    """The second of two prompts leaves the state where they part, wherever its chunks end."""
    driver = Driver(toy_config(32, 800), 2048, seed=3)
    shared = tokens_of(4, 300)
    for own, expected in ((5, 0), (6, 0), (7, 288)):
        request = driver.add([*shared, *tokens_of(own, 300)], max_tokens=2)
        driver.run_all(budget=1024)
        assert driver.hits[request.request_id] == expected


def test_the_first_prompt_leaves_a_state_where_it_is_marked() -> None:
    """In a full pool too, where nothing is left in memory that nothing else needs."""
    driver = Driver(toy_config(32, 160), 2048, seed=4)
    for number in range(8):
        driver.add(tokens_of(100 + number, 500), max_tokens=2)
        driver.run_all()
    shared = tokens_of(4, 300)
    marks = (300, 590, 20)  # the system prompt; near the end, and near the beginning: worth little
    driver.add([*shared, *tokens_of(5, 300)], max_tokens=2, cache_boundaries=marks)
    driver.run_all()
    request = driver.add([*shared, *tokens_of(6, 300)], max_tokens=2)
    driver.run_all()
    assert driver.hits[request.request_id] == 288


def test_a_turn_gives_up_the_state_it_began_at() -> None:
    driver = PrefixDriver(toy_config(32, 800), 4096)
    hasher = get_request_block_hasher(32, sha256)
    said = tokens_of(1, 300)
    driver.serve("first", said, hasher, 40)
    said += [0] * 40  # the answer
    found = driver.serve("second", [*said, *tokens_of(2, 100)], hasher, 40)
    assert found.hit_tokens == (340 - 1) // 32 * 32
    records = coordinator_of(driver.manager).index.checkpoints.values()
    standings = {record.position: record.standing.value for record in records}
    # Where the first prompt's resend would resume, and its answer's end; the same of the second.
    assert standings[288] == standings[320] == "superseded"
    assert standings[416] == "kept"
    assert standings[448] == "left"
    tiers = {record.position: record.tier for record in records}
    assert tiers[288] == tiers[320] == Tier.COLD


def test_a_missing_state_is_named_as_the_reason() -> None:
    driver = Driver(toy_config(32, 800), 2048, seed=6)
    shared = tokens_of(4, 300)
    driver.add([*shared, *tokens_of(5, 40)], max_tokens=2)
    driver.run_all()
    request = driver.add([*shared, *tokens_of(6, 40)], max_tokens=2)
    driver.run_all()
    assert driver.records[request.request_id].miss_tokens["state_not_retained"] > 0


def test_events_announce_a_state_by_the_prefix_it_stands_for() -> None:
    manager = make_manager(toy_config(32, 200), 1024, enable_kv_cache_events=True)
    request = make_request("a", tokens_of(8, 70), 32)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 70) is not None
    manager.coordinator.commit_step()
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    states = [event for event in stored if event.group_idx != 0]
    assert {event.kv_cache_spec_kind for event in states} == {"mamba"}
    assert [event.group_idx for event in states] == [1, 2, 3]
    boundary = maybe_convert_block_hash(request.block_hashes[1])
    assert all(event.block_hashes == [boundary] for event in states)
    assert all(event.token_ids == [] for event in states)


def test_a_worker_that_forgets_the_states_of_boundaries_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test's own worker is strict: were a state not stored, whoever resumes there fails."""
    driver = Driver(toy_config(32, 400), 2048, seed=2)
    prompt = tokens_of(2, 230)
    driver.add(prompt, max_tokens=1)
    write = RowMemory.write_state
    monkeypatch.setattr(
        RowMemory, "write_state", lambda *args: write(*args) if args[3] % 32 else None
    )
    driver.run_all()
    driver.add(prompt, max_tokens=1)
    with pytest.raises(AssertionError, match="resuming at 224, state of group"):
        driver.run_all()


@pytest.mark.slow
@pytest.mark.parametrize("pieces", PIECES)
def test_random_traffic_reads_no_other_state(pieces: int) -> None:
    num_hits = 0
    for seed in range(6):
        make_config = partial(toy_config, num_pieces=pieces)
        traffic = replace(Traffic.of_seed(7 * seed), make_config=make_config)
        driver = run_random_traffic(seed, traffic)
        assert not driver.rebuilt
        num_hits += sum(hit > 0 for hit in driver.hits.values())
    assert num_hits > 20


class ToyTraffic(UnitTraffic):
    """The scheduler's state machine over attention and states."""

    make_config = staticmethod(toy_config)


class ToyAsyncTraffic(ToyTraffic):
    """A step ahead."""

    depths = (2,)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [ToyTraffic, ToyAsyncTraffic])
def test_traffic(machine: type[UnitTraffic]) -> None:
    run_traffic(machine, 10)
