"""Hits at one unit: exactness of hits, no wrong read under pressure, records that add up."""

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.v1.core.unit_cache_driver import Driver, coordinator_of, make_manager, make_request
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.window_geometry import MISTRAL_LIKE, window_config
from vllm.distributed.kv_events import BlockStored
from vllm.exceptions import ConfigError, InvariantError
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import salt_digest
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.core.values.cache_step import StepRequest
from vllm.v1.request import Request


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_identical_resend_hits_the_largest_boundary_below_its_end(unit: int) -> None:
    for n in [unit + 1, 2 * unit, 2 * unit + 1, 127, 128, 129, 500, 512, 1000, 1024, 1300]:
        if n <= unit:
            continue
        driver = Driver(v4_config(unit, 2000), 4096, seed=n)
        prompt = tokens_of(n, n)
        for expected in (0, (n - 1) // unit * unit, (n - 1) // unit * unit):
            request = driver.add(prompt, max_tokens=3)
            driver.run_all(budget=2048)
            assert driver.hits[request.request_id] == expected, (n, expected)


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.slow
def test_next_turn_hits_prompt_and_answer(unit: int) -> None:
    driver = Driver(v4_config(unit, 2000), 8192, seed=1)
    history = tokens_of(5, 700)
    for turn in range(3):
        request = driver.add(history, max_tokens=130 + turn)
        driver.run_all(budget=512)
        answered = driver.finished[request.request_id]
        follow_up = driver.add([*answered, *tokens_of(turn, 90)], max_tokens=40)
        driver.run_all(budget=512)
        # The last sampled token was never computed, so its unit may be missing.
        assert driver.hits[follow_up.request_id] == (len(answered) - 1) // unit * unit
        history = driver.finished[follow_up.request_id]


def test_full_blocks_of_a_hit_that_one_other_holds_are_not_needed_twice() -> None:
    manager = make_manager(v4_config(32, 600), 2048)
    first, second = (make_request(name, tokens_of(1, 900), 32) for name in ("first", "second"))
    manager.new_step_starts()
    assert manager.allocate_slots(first, 900) is not None
    manager.coordinator.commit_step()
    found = manager.look_up(second)
    assert found.hit is not None
    num_full = sum(map(len, found.hit.full_blocks))
    assert num_full > 0
    needed = [
        coordinator_of(manager).num_blocks_in_full(StepRequest(second, 0, 900, 900, 900, lookup))
        for lookup in (None, found)
    ]
    assert needed[0] - needed[1] == num_full


def test_a_longer_sibling_resumes_at_an_aligned_prompt_end() -> None:
    driver = Driver(v4_config(32, 2000), 4096, seed=2)
    prompt = tokens_of(9, 320)
    driver.add(prompt, max_tokens=1)
    driver.run_all()
    sibling = driver.add([*prompt, *tokens_of(10, 50)], max_tokens=1)
    driver.run_all()
    assert driver.hits[sibling.request_id] == 320


def test_hit_shares_full_blocks_and_copies_partial_ones() -> None:
    config = v4_config(32, 500)
    driver = Driver(config, 4096, seed=3)
    prompt = tokens_of(3, 1000)
    first = driver.add(prompt, max_tokens=200)
    while first.num_computed_tokens < 1000:
        driver.step(2048)
    second = driver.add(prompt, max_tokens=2)
    driver.step(2048)
    assert driver.hits[second.request_id] == 992
    c4 = driver.coordinator.geometry.dense[0].group_id
    ours = driver.manager.get_block_ids(second.request_id)[c4]
    theirs = driver.manager.get_block_ids(first.request_id)[c4]
    # Blocks of 128 tokens: seven full ones shared, the eighth (896..992) a private copy.
    assert ours[:7] == theirs[:7]
    assert ours[7] != theirs[7]
    driver.run_all(budget=2048)


def test_a_copy_is_hit_when_its_source_is_gone_and_told_of_with_its_own_tokens() -> None:
    driver = Driver(v4_config(32, 500), 4096, seed=3)
    prompt = tokens_of(3, 1000)
    first = driver.add(prompt, max_tokens=200)
    while first.num_computed_tokens < 1000:
        driver.step(2048)
    second = driver.add(prompt, max_tokens=2)
    driver.step(2048)
    tables = [driver.manager.get_block_ids(r.request_id) for r in (first, second)]
    copied = [
        (group.group_id, theirs, ours)
        for group in driver.coordinator.geometry.dense
        for theirs, ours in zip(*(table[group.group_id] for table in tables), strict=False)
        if theirs != ours
    ]
    assert copied
    pool, index = driver.manager.block_pool, driver.coordinator.index
    for group_id, theirs, ours in copied:
        # The source's keys up to the hit, in their order.
        keys = [k for k in index.keys_of(pool.blocks[theirs]) if k in first.block_hashes[:31]]
        assert keys
        assert list(index.keys_of(pool.blocks[ours]))[: len(keys)] == keys, group_id
    driver.run_all(budget=2048)
    pool.evict_blocks(theirs for _, theirs, _ in copied)
    third = driver.add(prompt, max_tokens=2)
    driver.run_all(budget=2048)
    assert driver.hits[third.request_id] == 992


def test_evicting_a_block_of_a_running_request_ends_its_checkpoints() -> None:
    driver = Driver(v4_config(32, 400), 2048, seed=3)
    first = driver.add(tokens_of(3, 1000), max_tokens=200)
    while first.num_computed_tokens < 1056:
        driver.step(2048)
    # It carries the checkpoint of its last unit along, and holds the blocks.
    tokens = [*first.all_token_ids]
    (_, *_, last) = driver.coordinator.requests[first.request_id].windows[0].blocks
    assert driver.manager.look_up(make_request("before", tokens, 32)).num_tokens == 1056
    (record,) = driver.coordinator.index.members.open_ones_with(last)
    assert record.position == 1056
    driver.manager.evict_blocks([last.block_id])
    assert driver.manager.look_up(make_request("after", tokens, 32)).num_tokens == 1024
    driver.manager.check_invariants()


def test_without_dense_rows_a_checkpoint_is_found_whatever_became_of_those_before_it() -> None:
    driver = Driver(window_config(16, 400, 64, MISTRAL_LIKE), 2048, seed=3)
    request = driver.add(tokens_of(3, 100), max_tokens=100)
    while request.num_computed_tokens < 128:
        driver.step(2048)
    coordinator = driver.coordinator
    for record in tuple(coordinator.index.checkpoints.values()):
        coordinator.store.dissolve(record)
    assert not coordinator.index.lineage.parents, "the chain ends where a checkpoint does"
    while request.num_computed_tokens < 160:
        driver.step(2048)
    again = make_request("again", [*request.all_token_ids], 16)
    assert driver.manager.look_up(again).num_tokens == 160
    driver.manager.check_invariants()


def test_nothing_is_cached_or_hit_with_caching_off() -> None:
    config = v4_config(32, 400)
    manager = make_manager(config, 2048, enable_caching=False)
    for name in ("a", "b"):
        request = make_request(name, tokens_of(1, 200), 32)
        found = manager.look_up(request)
        assert found.num_tokens == 0
        assert manager.allocate_slots(request, 200, 0, found.blocks) is not None
        manager.coordinator.commit_step()
        manager.check_invariants({name: 0})
        manager.free(request)
    assert not coordinator_of(manager).index.checkpoints
    assert manager.usage == 0


def test_prompt_logprobs_bypass_reads_and_are_recorded() -> None:
    driver = Driver(v4_config(32, 400), 2048, seed=0)
    prompt = tokens_of(1, 300)
    driver.add(prompt)
    driver.run_all()
    request = make_request("bypass", prompt, 32)
    request.skip_reading_prefix_cache = True
    found = driver.manager.look_up(request)
    assert found.num_tokens == 0
    assert driver.manager.allocate_slots(request, 300, 0, found.blocks) is not None
    stats = driver.manager.record_admission(request, found, 0)
    assert stats.miss_tokens == {"bypassed": 300}


def test_records_add_up_and_name_reasons() -> None:
    driver = Driver(v4_config(32, 600), 4096, seed=4)
    prompt = tokens_of(4, 330)
    reasons = []
    # A middle cut: dense rows match up to 160, but no checkpoint was kept there.
    for tokens in (prompt, prompt, [*prompt[:160], *tokens_of(8, 40)], tokens_of(12, 20)):
        request = driver.add(tokens, max_tokens=1)
        driver.step(2048)
        stats = driver.records[request.request_id]
        assert stats.num_cached_tokens + sum(stats.miss_tokens.values()) == len(tokens)
        reasons.append((stats.num_cached_tokens, stats.dense_match_tokens, stats.miss_tokens))
        driver.run_all()
    assert reasons[0] == (0, 0, {"first_seen": 320, "above_last_boundary": 10})
    assert reasons[1] == (320, 320, {"above_last_boundary": 10})
    assert reasons[2][0] == 0
    assert reasons[2][1] == 160
    assert reasons[2][2]["window_not_retained"] == 160
    assert reasons[3] == (0, 0, {"above_last_boundary": 20})


def test_eviction_is_told_from_first_sight() -> None:
    config = v4_config(32, 160)
    driver = Driver(config, 512, seed=4)
    prompt = tokens_of(1, 400)
    driver.add(prompt, max_tokens=1)
    driver.run_all()
    for seed in range(2, 30):
        driver.add(tokens_of(seed, 400), max_tokens=1)
        driver.run_all()
    request = driver.add(prompt, max_tokens=1)
    driver.step(2048)
    stats = driver.records[request.request_id]
    assert stats.num_cached_tokens == 0
    assert stats.miss_tokens.get("evicted", 0) + stats.miss_tokens.get("window_evicted", 0) > 0


def test_pool_too_small_for_one_request_is_refused_at_start() -> None:
    config = v4_config(32, 60)
    with pytest.raises(ConfigError, match="max seq len 4096 needs"):
        make_manager(config, 4096)


def test_blocks_of_a_leaving_request_are_free_at_once() -> None:
    driver = Driver(v4_config(32, 600), 4096, seed=0)
    request = driver.add(tokens_of(1, 1500), max_tokens=50)
    driver.step(512)
    assert driver.manager.usage > 0
    driver.finish(request)
    assert driver.manager.usage == 0


def test_a_request_unscheduled_in_its_step_publishes_nothing() -> None:
    driver = Driver(v4_config(32, 600), 4096, seed=0)
    manager = driver.manager
    request = make_request("gone", tokens_of(1, 320), 32)
    assert manager.allocate_slots(request, 320) is not None
    manager.free(request)
    manager.coordinator.commit_step()
    other = make_request("other", tokens_of(1, 330), 32)
    assert manager.get_computed_blocks(other)[1] == 0


def test_private_prefill_window_takes_no_blocks_inside_the_chunk() -> None:
    config = replace(v4_config(32, 3000), prefix_cache_retention_interval="0")
    manager = make_manager(config, 16384)
    request = make_request("long", tokens_of(1, 8192 + 77), 32)
    assert manager.allocate_slots(request, 8192) is not None
    dense = sum(len(ids) for ids in manager.get_block_ids("long"))
    held = manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks()
    assert dense == 8192 // 128 + 2
    # Two window groups of 4 blocks, 2 blocks of C4 state, nothing of C128 state at 128 | 8192.
    assert held - dense == 2 * 4 + 2


def advance(manager: KVCacheManager, request: Request, num_new: int) -> bool:
    """Schedule tokens and, as if the model had run, append one behind the last."""
    manager.new_step_starts()
    if manager.allocate_slots(request, num_new) is None:
        return False
    manager.coordinator.commit_step()
    request.num_computed_tokens += num_new
    request.append_output_token_ids(7)
    manager.check_invariants({request.request_id: request.num_computed_tokens})
    return True


def test_events_of_prefixes_that_drafts_complete_name_the_salt() -> None:
    config = v4_config(32, 600)
    manager = make_manager(config, 4096, num_lookahead_tokens=4, enable_kv_cache_events=True)
    request = make_request("r", tokens_of(1, 30), 32, max_tokens=50, cache_salt="secret")
    assert advance(manager, request, 30)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 5, num_lookahead_tokens=4) is not None
    manager.coordinator.commit_step()
    assert manager.take_events() == []
    # A row and four drafts, which all stand: the first unit is complete.
    request.num_computed_tokens += 5
    request.append_output_token_ids([1, 2, 3, 4, 5])
    assert advance(manager, request, 1)
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored) and e.token_ids]
    assert [e.token_ids for e in stored] == [request.all_token_ids[:32]]
    assert stored[0].extra_keys == [(salt_digest("secret"),)]


def test_decode_goes_to_the_pool_once_in_a_quarter_of_a_unit() -> None:
    manager = make_manager(v4_config(32, 600), 4096)
    request = make_request("r", tokens_of(1, 64), 32, max_tokens=200)
    assert advance(manager, request, 64)
    pool, took = manager.block_pool, []
    for _ in range(100):
        free, computed = pool.get_num_free_blocks(), request.num_computed_tokens
        assert advance(manager, request, 1)
        if pool.get_num_free_blocks() != free:
            took.append(computed)
    assert took, "nothing was taken"
    # At multiples of 32 boundaries complete; else blocks of 2 tokens are taken 4 at a time.
    assert all(p % 8 == 0 or p % 32 == 31 for p in took), took


def test_decode_takes_what_it_needs_where_the_pool_has_no_more() -> None:
    manager = make_manager(v4_config(32, 600), 4096)
    request = make_request("r", tokens_of(1, 72), 32, max_tokens=200)
    assert advance(manager, request, 72)
    pool = manager.block_pool
    # Blocks of both kinds of state are due, of 2 and of 8 tokens, beside one the step gives back.
    hoard = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    num_free = pool.get_num_free_blocks()
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1) is not None
    assert pool.get_num_free_blocks() <= num_free
    pool.free_blocks(hoard)


def test_decode_takes_no_blocks_beyond_the_longest_context() -> None:
    manager = make_manager(v4_config(32, 600), 75)
    request = make_request("r", tokens_of(1, 72), 32, max_tokens=3)
    assert advance(manager, request, 72)
    assert advance(manager, request, 1)
    for table in coordinator_of(manager).requests["r"].windows:
        assert (table.base + len(table.blocks) - 1) * table.geometry.block_size < 75


def test_invariant_checker_notices_a_wrong_count() -> None:
    manager = make_manager(v4_config(32, 400), 2048)
    manager.check_invariants()
    manager.block_pool.blocks[5].ref_cnt += 1
    with pytest.raises(InvariantError, match=r"I[123]"):
        manager.check_invariants()


class CacheMachine(RuleBasedStateMachine):
    """Arbitrary interleavings of arrivals, steps, departures and resets; I1..I5 after each."""

    @initialize(
        unit=st.sampled_from([32, 64, 128]),
        spare=st.integers(0, 40),
        pinned_share=st.sampled_from([None, 0.1, 0.5, 1.0]),
        is_priority=st.booleans(),
        rule=st.sampled_from((None, *Rule)),
    )
    def start(
        self,
        unit: int,
        spare: int,
        pinned_share: float | None,
        is_priority: bool,
        rule: Rule | None,
    ) -> None:
        self.unit = unit
        big = make_manager(v4_config(unit, 4000), 512)
        blocks = max_request_blocks(coordinator_of(big).geometry, 512) + 2 + spare
        self.driver = Driver(
            v4_config(unit, blocks),
            512,
            seed=spare,
            pinning=None if pinned_share is None else PinSettings(pinned_share, 4),
            is_priority=is_priority,
            rule=rule,
        )
        self.prompts: list[list[int]] = [[1] * 200]

    @rule(
        seed=st.integers(0, 3),
        length=st.integers(1, 400),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
    )
    def add_fresh(self, seed: int, length: int, max_tokens: int, priority: int) -> None:
        self.prompts.append(tokens_of(seed, length))
        self.driver.add(self.prompts[-1], max_tokens, priority)

    @rule(data=st.data(), cut=st.integers(1, 400), extra=st.integers(0, 60))
    def add_relative(self, data: st.DataObject, cut: int, extra: int) -> None:
        base = data.draw(st.sampled_from(self.prompts))
        self.driver.add([*base[:cut], *tokens_of(extra, extra)][:470], max_tokens=4)

    @rule(budget=st.sampled_from([16, 64, 200, 512]))
    def step(self, budget: int) -> None:
        self.driver.step(budget)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.driver.running:
            self.driver.finish(data.draw(st.sampled_from(self.driver.running)))

    @rule()
    def reset(self) -> None:
        idle = not self.driver.running
        assert self.driver.manager.reset_prefix_cache() == idle
        if idle:
            assert not self.driver.coordinator.index.checkpoints
            assert not list(self.driver.manager.block_pool.pins or ())

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run_all()
            assert self.driver.manager.usage == 0


TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
