"""What the learning policy answers from what it learnt."""

import pytest

from benchmarks.v4_cache import flash_config
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.policy import ASKED_FOR


@pytest.fixture
def policy() -> AutoPolicy:
    return AutoPolicy(CacheGeometry.from_config(flash_config(32, 1000)), 1000)


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
