"""What steps publish and pin, through the manager of hits at one unit."""

import logging
import random
from dataclasses import replace

import pytest

from tests.v1.core.unit_cache_driver import Driver, coordinator_of, make_manager
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.retention.pinning import PinSettings, resolve_pins
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint
from vllm.v1.kv_cache_interface import KVCacheConfig


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def make_driver(
    unit: int = 32,
    *,
    share: float | None = 0.25,
    min_drop: int = 16,
    blocks: int = 2000,
    policy: str = "0",
) -> Driver:
    pinning = None if share is None else PinSettings(share, min_drop)
    return Driver(v4_config(unit, blocks), 8192, seed=0, policy=policy, pinning=pinning)


def pins_of(driver: Driver) -> list[Checkpoint]:
    """Return what is pinned, the oldest pin first."""
    pinned = list(driver.manager.block_pool.pins or ())
    assert all(isinstance(record, Checkpoint) for record in pinned)
    return [record for record in pinned if isinstance(record, Checkpoint)]


def pinned_positions(driver: Driver) -> list[int]:
    return [record.position for record in pins_of(driver)]


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_a_prompt_is_pinned_where_its_chunks_end(unit: int) -> None:
    driver = make_driver(unit)
    driver.manager.new_step_starts()
    request = driver.add(tokens_of(1, 2500), 1)
    for start, end in ((0, 1024), (1024, 2048), (2048, 2500)):
        request.num_computed_tokens = start
        assert driver.manager.allocate_slots(request, end - start) is not None
        driver.manager.coordinator.commit_step()
    assert pinned_positions(driver) == [1024, 2048, 2500 // unit * unit]
    driver.manager.check_invariants()
    driver.manager.free(request)
    driver.manager.check_invariants()
    # An interval or a junction would keep them too, but nothing else asked for 1,024 here.
    for cut in (1100, 2100):
        follower = driver.add([*tokens_of(1, 2500)[:cut], *tokens_of(2, 50)], 1)
        assert driver.manager.get_computed_blocks(follower)[1] == cut // 1024 * 1024
    blocks = [b for r in pins_of(driver) for b in r.all_blocks()]
    assert {driver.manager.block_pool.tier_of(b) for b in blocks} == {Tier.PINNED}


def test_without_pins_nothing_is_kept_where_chunks_end() -> None:
    driver = make_driver(share=None)
    driver.add(tokens_of(1, 2500), 1)
    driver.run_all(budget=1024)
    follower = driver.add([*tokens_of(1, 2500)[:1100], *tokens_of(2, 50)], 1)
    assert driver.manager.get_computed_blocks(follower)[1] == 0
    assert driver.manager.block_pool.pins is None


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [31, 200, 1000])
def test_decode_steps_pin_nothing(num_tokens: int) -> None:
    driver = make_driver(blocks=400)
    request = driver.add(tokens_of(1, num_tokens), 150)
    driver.step(2048)
    pins = pinned_positions(driver)
    assert pins == [p for p in (num_tokens // 32 * 32,) if p]
    while request.num_output_tokens < 140:
        driver.step(2048)
    assert pinned_positions(driver) == pins


def test_short_prompts_pin_nothing() -> None:
    # Blocks of 2 tokens in the smallest group, and 4 tokens are kept: 60 drop 28 of them.
    for min_drop, expected in ((28, [32]), (29, [])):
        driver = make_driver(min_drop=min_drop)
        driver.add(tokens_of(1, 60), 1)
        driver.run_all()
        assert pinned_positions(driver) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "unpinned_hit"), [("0", 256), ("auto", 96)])
def test_a_pinned_window_outlives_a_flood(policy: str, unpinned_hit: int) -> None:
    """A conversation keeps its dense rows in use, but not the window at which it began."""

    def hit_after_flood(share: float | None) -> int:
        pinning = None if share is None else PinSettings(share, 64)
        driver = Driver(v4_config(32, 200), 1024, seed=0, policy=policy, pinning=pinning)
        history = tokens_of(1, 300)
        for turn in range(6):
            request = driver.add(history, 2)
            driver.run_all(budget=2048)
            history = [*driver.finished[request.request_id], *tokens_of(100 + turn, 60)]
            # Short prompts pin nothing and leave their checkpoints behind.
            for seed in range(3):
                driver.add(tokens_of(1000 * turn + seed, 100), 1)
                driver.run_all(budget=2048)
        assert len(pinned_positions(driver)) == (share is not None)
        again = driver.add(tokens_of(1, 300), 1)
        return driver.manager.get_computed_blocks(again)[1]

    assert hit_after_flood(None) == unpinned_hit
    assert hit_after_flood(0.25) == 288


@pytest.mark.slow
def test_pins_give_way_to_admission() -> None:
    driver = make_driver(share=1.0, blocks=400)
    for seed in range(8):
        driver.add(tokens_of(seed, 1000), 1)
        driver.run_all(budget=256)
    many = pinned_positions(driver)
    assert len(many) > 10
    long = driver.add(tokens_of(99, 8000), 1)
    driver.step(8192)
    assert driver.finished[long.request_id]
    assert 0 < len(pinned_positions(driver)) < len(many)


@pytest.mark.slow
def test_a_pin_outranks_being_superseded() -> None:
    driver = make_driver(policy="auto", blocks=600)
    history = tokens_of(1, 640)
    for turn in range(4):
        request = driver.add(history, 40)
        driver.run_all(budget=2048)
        history = [*driver.finished[request.request_id], *tokens_of(50 + turn, 200)]
    pool = driver.manager.block_pool
    at_640 = next(r for r in driver.coordinator.index.checkpoints.values() if r.position == 640)
    assert at_640.standing is CheckpointStanding.SUPERSEDED
    assert {pool.tier_of(block) for block in at_640.all_blocks()} == {Tier.PINNED}


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.delenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", raising=False)
    return monkeypatch


def coordinator_for(config: KVCacheConfig, enable_caching: bool = True) -> CheckpointCoordinator:
    return coordinator_of(make_manager(config, 512, enable_caching=enable_caching))


def test_the_variables_reach_the_unit_cache(pinning: pytest.MonkeyPatch) -> None:
    config = v4_config(32, 401)
    pinning.setenv("VLLM_PIN_MIN_DROP_SIZE", "7")
    pinning.setenv("VLLM_PIN_MAX_SHARE", "0.1")
    pinning.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "256")
    coordinator = coordinator_for(config)
    assert coordinator.policy.name == "256"
    assert coordinator.prefixes.pinning == PinSettings(0.1, 7)
    assert coordinator.block_pool.pins is not None
    assert coordinator.block_pool.pins.max_blocks == 40
    flagged = coordinator_for(replace(config, prefix_cache_pinned_share=0.5))
    assert flagged.prefixes.pinning == PinSettings(0.5, 7)
    assert coordinator_for(config, False).block_pool.pins is None
    pinning.delenv("VLLM_PIN_SWA_TOKENS")
    assert coordinator_for(config).block_pool.pins is None


@pytest.mark.parametrize(("share", "expected"), [("0.25", 100 // 22), ("0", 0)])
def test_start_up_says_how_many_prefixes_fit(
    share: str, expected: int, pinning: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning.setenv("VLLM_PIN_MAX_SHARE", share)
    pinning.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.v1.core.retention.pinning"):
        coordinator_for(v4_config(32, 401))
    (message,) = [r.getMessage() for r in caplog.records]
    assert f"room for {expected} prefixes" in message
    assert (
        f"VLLM_PIN_SWA_TOKENS=1, VLLM_PIN_MIN_DROP_SIZE=16, a share of {float(share):g} " in message
    )
    # Per token a 32nd of a C4 block and a 128th of a C128 block, and so on.
    per_token = sum(
        1 / group.block_size for group in coordinator_for(v4_config(32, 401)).geometry.dense
    )
    assert f"holds {int(400 / per_token):,} tokens" in message


def test_the_earlier_spelling_is_taken_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VLLM_PIN_SWA_TOKENS", raising=False)
    monkeypatch.setenv("VLLM_PIN_PREFIX_BLOCKS", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm.v1.core.retention.pinning"):
        coordinator = coordinator_for(v4_config(32, 401))
    assert coordinator.prefixes.pinning == PinSettings(0.25, 16)
    assert [
        "VLLM_PIN_PREFIX_BLOCKS is an earlier spelling" in r.message for r in caplog.records
    ] == [True]
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "0")
    assert coordinator_for(v4_config(32, 401)).prefixes.pinning is None


def test_a_least_drop_of_nothing_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every step that completes a unit pins, and one within the first unit nothing."""
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.setenv("VLLM_PIN_MIN_DROP_SIZE", "0")
    config = v4_config(32, 400)
    driver = Driver(config, 1024, seed=0, pinning=resolve_pins(config))
    assert driver.coordinator.prefixes.pinning == PinSettings(0.25, 0)
    for length in (5, 31, 32, 100):
        driver.add(list(range(length)), 2)
        driver.run_all(budget=512)
    assert list(driver.manager.block_pool.pins or ())
    driver.check()


def test_a_free_block_whose_rows_are_computed_again_caches_nothing() -> None:
    driver = make_driver(policy="auto", share=None, blocks=400)
    tokens, pool = tokens_of(1, 500), driver.manager.block_pool
    driver.add(tokens, 1)
    driver.run_all()
    first = {b.block_id for b in pool.blocks if b.key is not None}
    again = driver.add(tokens, 1)
    again.skip_reading_prefix_cache = True
    driver.run_all()
    second = {b.block_id for b in pool.blocks if b.key is not None}
    assert second
    assert not first & second
    free = [pool.tier_of(pool.blocks[block_id]) for block_id in first]
    assert set(free) == {Tier.SCRATCH}
    driver.check()
