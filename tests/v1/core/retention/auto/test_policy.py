"""What the learning policy answers from what it learnt."""

import random
from hashlib import sha256

import pytest

from benchmarks.recurrent_workloads import make_cache
from benchmarks.v4_cache import flash_config
from tests.v1.core.retention.auto.test_conversations import make_prompts
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.policy import ASKED_FOR, COARSE
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier


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
        assert not policy.note_hit(ASKED_FOR, 1000), "what was asked for needs no proof"
    found = [policy.note_hit(1, 1000) for _ in range(10)]
    # From the hit on with which it is hit as often, and told once.
    assert found == [False] * 7 + [True] + [False] * 2
    assert policy.note_made(1)
    assert not policy.note_made(2)
    assert not policy.note_made(ASKED_FOR)
    policy.reset()
    assert not policy.note_made(1)


def test_the_coarse_checkpoint_is_left_out_once_it_does_not_pay(policy: AutoPolicy) -> None:
    coarse, length = 9728, 10_001
    assert coarse in policy.prompt_boundaries(length)
    assert policy.kind_of(coarse, length) == COARSE
    others = [p for p in policy.prompt_boundaries(length) if p != coarse]
    assert {policy.kind_of(p, length) for p in others} == {ASKED_FOR}
    # A prompt that ends there keeps it anyway.
    assert policy.kind_of(coarse, coarse) == ASKED_FOR
    for _ in range(100):
        policy.observe([], length, 0.5)
        policy.note_made(ASKED_FOR)
        policy.note_made(COARSE)
        assert not policy.note_hit(ASKED_FOR, length - 1)
    lengths = range(10_001, 10_033)
    kept = [n for n in lengths if n // 512 * 512 in policy.prompt_boundaries(n)]
    # A few go on to try it, and planning again says the same.
    assert 0 < len(kept) < 8
    assert kept == [n for n in lengths if n // 512 * 512 in policy.prompt_boundaries(n)]
    policy.reset()
    assert coarse in policy.prompt_boundaries(length)


def tier_of_superseded(policy: AutoPolicy) -> Tier:
    return policy.tier(CheckpointStanding.SUPERSEDED, is_lean=True, is_used=False)


@pytest.mark.parametrize(
    ("returns", "num_blocks", "at_once", "tier"),
    [(0.0, 125, True, Tier.COLD), (0.5, 465, False, Tier.REGULAR)],
)
def test_conversations_give_up_what_nobody_returns_to(
    returns: float, num_blocks: int, at_once: bool, tier: Tier
) -> None:
    geometry = CacheGeometry.from_config(flash_config(128, num_blocks))
    policy = AutoPolicy(geometry, num_blocks)
    assert not policy.supersedes_at_once
    assert tier_of_superseded(policy) is Tier.COLD
    for prompt in make_prompts(random.Random(2), 1500, returns=returns):
        # Spans of 512 tokens: four units of 128.
        hashes = [BlockHash(sha256(b"%d %d" % (n, i)).digest()) for n in prompt for i in range(4)]
        policy.observe(hashes, 512 * len(prompt), 0.8)
    assert policy.supersedes_at_once is at_once
    assert tier_of_superseded(policy) is tier
    policy.reset()
    assert not policy.supersedes_at_once
