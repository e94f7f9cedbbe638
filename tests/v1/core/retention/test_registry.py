"""From what operators write to a policy; and a policy added by one file and one line."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.v1.core.retention.lru_of_everything import LruOfEverything
from tests.v1.core.unit_cache_driver import Driver, coordinator_of, make_manager
from tests.v1.core.v4_geometry import v4_config
from vllm.config import retention
from vllm.exceptions import ConfigError
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.fixed import FixedPolicy
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.core.retention.tiers import Tier

LINE = '"lru": "tests.v1.core.retention.lru_of_everything:LruOfEverything"'


@pytest.fixture
def with_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry with the one line that the guide says to add."""
    name, path = (part.strip('"') for part in LINE.split(": "))
    monkeypatch.setattr(retention, "POLICIES", {**retention.POLICIES, name: path})
    monkeypatch.setattr("vllm.v1.core.retention.registry.POLICIES", retention.POLICIES)


def tokens_of(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


@pytest.mark.parametrize("name", retention.POLICIES)
def test_every_policy_of_the_registry_can_be_built_and_says_what_it_keeps(name: str) -> None:
    policy: RetentionPolicy = make_policy(name, CacheGeometry.from_config(v4_config(32, 9)), 8)
    assert policy.name == name
    assert "window state" in policy.describe()


def test_numbers_are_intervals_and_nothing_said_is_auto() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 9))
    assert isinstance(make_policy(None, geometry, 8), AutoPolicy)
    fixed = make_policy("4096", geometry, 8)
    assert isinstance(fixed, FixedPolicy)
    assert (fixed.name, fixed.interval) == ("4096", 4096)
    assert list(fixed.grid(4096, 12_288)) == [8192, 12_288]
    assert fixed.describe().endswith("every 4096 tokens")


@pytest.mark.usefixtures("with_lru")
def test_a_policy_is_one_file_and_one_line() -> None:
    config = replace(v4_config(32, 3000), prefix_cache_retention_interval="LRU")
    policy = coordinator_of(make_manager(config, 512)).policy
    assert isinstance(policy, LruOfEverything)
    driver = Driver(v4_config(32, 3000), 8192, seed=0, policy="lru")
    prompt = tokens_of(1, 1000)
    driver.add(prompt, 4)
    driver.run_all(budget=512)
    # Nobody asked for these places, and every one of them hits.
    for cut in (64, 320, 500, 777):
        request = driver.add([*prompt[:cut], *tokens_of(cut, 60)], 1)
        driver.run_all()
        assert driver.hits[request.request_id] == cut // 32 * 32
    pool, index = driver.manager.block_pool, driver.coordinator.index
    free = [pool.tier_of(b) for r in index.checkpoints.values() for b in r.all_blocks()]
    assert set(free) == {Tier.REGULAR}
    driver.check()


@pytest.mark.slow
@pytest.mark.usefixtures("with_lru")
def test_a_new_policy_keeps_the_invariants_in_a_tight_pool() -> None:
    driver = Driver(v4_config(32, 260), 1024, seed=3, policy="lru")
    for seed in range(12):
        driver.add(tokens_of(seed % 5, 150 + 40 * (seed % 3)), 6)
        driver.run_all(budget=300)
    assert len(driver.finished) == 12
    assert sum(driver.hits.values()) > 0


def test_a_name_that_nobody_registered_is_refused_with_those_there_are() -> None:
    geometry = CacheGeometry.from_config(v4_config(32, 9))
    known = ", ".join(retention.POLICIES)
    with pytest.raises(ConfigError, match=f"use {known}, 0, or a positive multiple of 32"):
        make_policy("nobody", geometry, 8)


def test_the_guide_shows_the_file_and_the_line() -> None:
    guide = Path(__file__).parents[4] / "docs/how-to/policy.md"
    text = guide.read_text(encoding="utf-8")
    assert LINE in text
    code = Path(__file__).with_name("lru_of_everything.py").read_text(encoding="utf-8")
    assert code.strip() in text
    for name in vars(RetentionPolicy):
        if not name.startswith("_"):
            assert f"`{name}" in text, name


def test_an_unknown_name_in_the_variable_is_refused_when_the_cache_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "dense")
    known = ", ".join(retention.POLICIES)
    with pytest.raises(ConfigError, match=f"'dense' is not valid here: use {known}, 0"):
        make_manager(v4_config(32, 400), 512)
