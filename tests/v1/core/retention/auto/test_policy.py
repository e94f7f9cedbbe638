"""What the learning policy answers from what it learnt."""

import pytest

from benchmarks.recurrent_workloads import make_cache
from benchmarks.v4_cache import flash_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.policy import ASKED_FOR


@pytest.fixture
def policy() -> AutoPolicy:
    return AutoPolicy(CacheGeometry.from_config(flash_config(32, 1000)), 1000)


@pytest.mark.parametrize(
    "model", ["gemma4-e4b", "gemma4-12b", "qwen3.5-4b", "kimi-linear", "glm-5.3-flash"]
)
def test_states_and_wide_windows_are_heavy(model: str) -> None:
    made = AutoPolicy(CacheGeometry.from_config(make_cache(model, "auto", 400_000)), 10_000)
    assert made.supersedes_at_once
    assert made.marked_boundaries(300_000, [200_000])


def test_narrow_windows_are_not(policy: AutoPolicy) -> None:
    assert not policy.supersedes_at_once
    assert not policy.marked_boundaries(300_000, [200_000])


def test_only_spare_checkpoints_of_a_kind_that_is_hit_pay(policy: AutoPolicy) -> None:
    for _ in range(8):
        assert not policy.note_made(ASKED_FOR)
        assert not policy.note_made(1)
        assert not policy.note_hit(ASKED_FOR), "what was asked for needs no proof"
    found = [policy.note_hit(1) for _ in range(10)]
    # From the hit on with which it is hit as often, and told once.
    assert found == [False] * 7 + [True] + [False] * 2
    assert policy.note_made(1)
    assert not policy.note_made(2)
    assert not policy.note_made(ASKED_FOR)
    policy.reset()
    assert not policy.note_made(1)
