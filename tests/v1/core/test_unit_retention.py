"""What the policies keep: junctions, superseded checkpoints, intervals; whom to wait for."""

import random
from dataclasses import replace

import pytest

from benchmarks.policies import VariantPolicy
from tests.v1.core.unit_cache_driver import Driver, PolicyMaker, coordinator_of, make_manager
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.window_geometry import GPT_OSS_LIKE, window_config
from vllm.exceptions import ConfigError
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.fixed import FixedPolicy
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.request import Request


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def serve(driver: Driver, tokens: list[int], max_tokens: int = 2) -> int:
    """Run one request alone and return its hit."""
    request = driver.add(tokens, max_tokens)
    driver.run_all(budget=2048)
    return driver.hits[request.request_id]


def ends_only(geometry: CacheGeometry) -> VariantPolicy:
    return VariantPolicy(geometry, "ends only")


def make_driver(
    unit: int = 32, policy: str | int | PolicyMaker = "auto", blocks: int = 3000
) -> Driver:
    return Driver(v4_config(unit, blocks), 8192, seed=0, policy=policy)


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("shared", [200, 256, 640, 1000, 1535])
def test_a_junction_is_discovered_at_the_second_sighting(unit: int, shared: int) -> None:
    driver = make_driver(unit)
    system = tokens_of(1, shared)
    hits = [serve(driver, system + tokens_of(10 + i, 300)) for i in range(5)]
    assert hits[0] == 0
    assert hits[2:] == [shared // unit * unit] * 3


def test_no_junction_where_a_shorter_prompt_merely_ends() -> None:
    driver = make_driver()
    prompt = tokens_of(1, 500)
    serve(driver, prompt)
    longer = driver.add([*prompt, *tokens_of(2, 500)], 1)
    driver.run_all(budget=2048)
    assert driver.hits[longer.request_id] == 480
    assert not any(
        r.standing is CheckpointStanding.JUNCTION
        for r in driver.coordinator.index.checkpoints.values()
    )


def test_a_conversation_supersedes_the_checkpoint_before_last() -> None:
    driver = make_driver()
    index = driver.coordinator.index
    history = tokens_of(1, 600)
    begun_at: list[int] = []
    for turn in range(4):
        request = driver.add(history, 40)
        driver.run_all(budget=2048)
        begun_at.append(driver.hits[request.request_id])
        history = [*driver.finished[request.request_id], *tokens_of(50 + turn, 200)]
    leans = [p // 128 * 128 for p in begun_at]
    cold = {r.position for r in index.checkpoints.values() if r.tier is Tier.COLD}
    assert {leans[1], leans[2]} <= cold, "where earlier turns began nobody is expected any more"
    assert leans[3] not in cold, "the last turn may still be asked again"


def test_a_second_continuation_makes_a_superseded_checkpoint_a_junction() -> None:
    driver = make_driver()
    system = tokens_of(1, 640)
    serve(driver, system)
    pool, index = driver.manager.block_pool, driver.coordinator.index
    at_640 = next(r for r in index.checkpoints.values() if r.position == 640)
    first = driver.add([*system, *tokens_of(2, 300)], 1)
    driver.run_all(budget=2048)
    serve(driver, [*driver.finished[first.request_id], *tokens_of(4, 300)])
    assert at_640.tier is Tier.COLD
    assert serve(driver, [*system, *tokens_of(3, 300)]) == 640
    assert at_640.standing is CheckpointStanding.JUNCTION
    assert at_640.tier is not Tier.COLD
    blocks = [b for b in at_640.all_blocks() if b.ref_cnt == 0]
    assert {pool.tier_of(b) for b in blocks} == {Tier.REGULAR}


def test_what_only_the_unaligned_boundary_needs_goes_first() -> None:
    driver = make_driver(policy=ends_only)
    serve(driver, tokens_of(1, 1000))
    pool, index = driver.manager.block_pool, driver.coordinator.index
    by_position = {r.position: r for r in index.checkpoints.values()}
    assert set(by_position) == {512, 896, 992}
    assert by_position[992].tier is Tier.COLD
    assert by_position[896].tier is not Tier.COLD
    c128_state = by_position[992].blocks[-1]
    assert len(c128_state) == 96 // 8
    assert {pool.tier_of(block) for block in c128_state} == {Tier.COLD}


@pytest.mark.parametrize("shared", [300, 1000])
def test_siblings_that_arrive_together_wait_for_the_first(shared: int) -> None:
    driver = make_driver()
    system = tokens_of(1, shared)
    requests = [driver.add(system + tokens_of(10 + i, 100), 3) for i in range(4)]
    driver.run_all(budget=2048)
    hits = [driver.hits[r.request_id] for r in requests]
    assert hits == [0, *[shared // 32 * 32] * 3]


def test_waiting_is_bounded_when_the_donor_does_not_get_on() -> None:
    driver = make_driver()
    system = tokens_of(1, 3000)
    donor = driver.add(system, 1)
    driver.step(128)
    manager = driver.manager
    follower = Request(
        request_id="follower",
        prompt_token_ids=[*system, 1],
        sampling_params=donor.sampling_params,
        pooling_params=None,
        block_hasher=None,
    )
    follower.block_hashes = list(donor.block_hashes)
    waited = 0
    for _ in range(1000):
        manager.new_step_starts()
        if not manager.should_wait(follower, manager.look_up(follower)):
            break
        waited += 1
    assert 0 < waited < 30


def test_a_short_shared_prefix_is_worth_the_step_that_computes_it_anyway() -> None:
    driver = make_driver()
    system = tokens_of(1, 64)
    first, second = (driver.add(system + tokens_of(10 + i, 100), 3) for i in range(2))
    driver.step(2048)
    assert {r.request_id for r in driver.running} == {first.request_id}
    driver.step(2048)
    assert {r.request_id for r in driver.running} == {first.request_id, second.request_id}
    assert driver.hits[second.request_id] == 64


def test_an_interval_keeps_a_grid_and_none_keeps_the_common_multiple() -> None:
    for value, expected in (("1024", [1024, 2048, 3072, 4096]), ("none", [4096])):
        driver = make_driver(policy=value)
        serve(driver, tokens_of(1, 5000))
        positions = {r.position for r in driver.coordinator.index.checkpoints.values()}
        assert set(expected) <= positions
        assert 4992 in positions
        for p in expected:
            assert serve(driver, [*tokens_of(1, 5000)[:p], *tokens_of(p, 20)]) == p


@pytest.mark.parametrize("value", ["none", "64"])
def test_a_pool_too_small_for_the_interval_serves_what_it_admits(value: str) -> None:
    """A checkpoint at every unit: more blocks than the gate counts, if windows have such blocks."""
    geometry = CacheGeometry.from_config(window_config(32, 10, 128, GPT_OSS_LIKE))
    config = window_config(32, max_request_blocks(geometry, 1024) + 1, 128, GPT_OSS_LIKE)
    driver = Driver(config, 1024, seed=0, policy=value)
    prompt = tokens_of(1, 1000)
    assert serve(driver, prompt) == 0
    assert serve(driver, prompt) == 992


def test_where_a_chunk_ended_stays_hittable_while_memory_lasts() -> None:
    """Under a policy that fills memory; else the next chunk's end replaces it."""
    prompt = tokens_of(1, 1536)
    for policy, expected in (("auto", 640), ("0", 0)):
        driver = make_driver(policy=policy)
        driver.add(prompt, 1)
        driver.run_all(budget=640)
        assert serve(driver, [*prompt[:700], *tokens_of(2, 50)]) == expected


def test_interval_zero_keeps_ends_but_ages_them_equally() -> None:
    driver = make_driver(policy=0)
    serve(driver, tokens_of(1, 640))
    serve(driver, [*tokens_of(1, 640), *tokens_of(2, 300)])
    records = {r.position: r for r in driver.coordinator.index.checkpoints.values()}
    assert records[640].tier is Tier.REGULAR


@pytest.mark.parametrize("value", ["33", "-128", "16", "often", "1.5"])
def test_bad_intervals_are_refused_with_what_is_allowed(value: str) -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 200))
    with pytest.raises(ConfigError, match="auto, none, 0, or a positive multiple of 32"):
        make_policy(value, geometry, 100)


def test_spellings_of_the_policies() -> None:
    geometry = CacheGeometry.from_config(v4_config(64, 10))
    assert isinstance(make_policy(None, geometry, 9), AutoPolicy)
    assert isinstance(make_policy("AUTO", geometry, 9), AutoPolicy)
    for value, interval in (("none", 8192), (256, 256), ("0", 0)):
        policy = make_policy(value, geometry, 9)
        assert isinstance(policy, FixedPolicy)
        assert policy.interval == interval


def test_without_private_windows_a_chunk_takes_blocks_for_every_row() -> None:
    driver = make_driver(
        policy=lambda geometry: VariantPolicy(
            geometry, "as others do", keeps_lean=False, private_window=False
        )
    )
    driver.add(tokens_of(1, 2048), 1)
    manager = driver.manager
    free = manager.block_pool.get_num_free_blocks()
    driver.step(1024)
    taken = free - manager.block_pool.get_num_free_blocks()
    assert taken > 1024 // 2
    driver.run_all(budget=1024)


@pytest.mark.parametrize(
    ("variable", "field", "expected"),
    [
        (None, None, "auto"),
        ("none", None, "none"),
        ("auto", None, "auto"),
        ("0", None, "0"),
        ("256", None, "256"),
        ("256", "none", "none"),
        ("none", "auto", "auto"),
    ],
)
def test_the_field_beats_the_variable(
    variable: str | None, field: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", variable)
    config = replace(v4_config(32, 200), prefix_cache_retention_interval=field)
    assert coordinator_of(make_manager(config, 512)).policy.name == expected


def test_a_second_conversation_hits_the_marked_end_of_a_system_prompt_at_once() -> None:
    driver = make_driver()
    system = tokens_of(1, 1900)
    request = driver.add([*system, *tokens_of(2, 3000)], 2)
    request.cache_boundaries = (1900,)
    driver.run_all(budget=2048)
    second = driver.add([*system, *tokens_of(3, 500)], 2)
    driver.run_all(budget=2048)
    assert driver.hits[second.request_id] == 1900 // 128 * 128
