"""Against a cache written as one list, which knows nothing of queues."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.v1.core.retention.auto.test_eviction import expected_victim
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.shadow import Shadow
from vllm.v1.core.retention.queues import Standing


@dataclass
class PlainCache:
    """Key -> (stamp, standing), and evicted keys, oldest first."""

    rule: Rule
    capacity: int

    def __post_init__(self) -> None:
        self.held: dict[int, tuple[int, Standing]] = {}
        self.given_up: list[int] = []
        self.now = 0

    def serve(self, keys: Sequence[int]) -> int:
        num_hit = 0
        while num_hit < len(keys) and keys[num_hit] in self.held:
            num_hit += 1
        known = {key for key in keys if key in self.held}
        for key in known:
            del self.held[key]
        while self.held and len(self.held) + len(keys) > self.capacity:
            entries = list(self.held.values())
            victim = expected_victim(self.rule, entries, self.capacity, self.now)
            key = next(key for key, entry in self.held.items() if entry == victim)
            del self.held[key]
            self.given_up = [*self.given_up, key][-self.capacity :]
        for key in reversed(keys):
            self.now += 1
            if key in known:
                standing = Standing.HIT
            elif key in self.given_up:
                self.given_up.remove(key)
                standing = Standing.RETURNED
            else:
                standing = Standing.NEW
            self.held[key] = (self.now, standing)
        return num_hit


@pytest.mark.parametrize("rule", Rule)
def test_hits_are_those_of_a_plain_cache(rule: Rule) -> None:
    rng = random.Random(rule.value)
    shadow, plain = Shadow(rule, 30), PlainCache(rule, 30)
    hits = 0
    for _ in range(600):
        root = rng.choice([0, 0, 100, 200, 300, 1000 + 50 * rng.randrange(200)])
        keys = list(range(root, root + rng.randint(1, 12)))
        found = shadow.serve(keys)
        assert found == plain.serve(keys)
        hits += found
    assert hits > 500


def test_residents_survive_a_loop_that_least_recent_use_loses() -> None:
    prompts = [list(range(10 * i, 10 * i + 10)) for i in range(12)]
    hits = {}
    for rule in (Rule.LRU, Rule.RESIDENTS):
        shadow = Shadow(rule, 80)
        hits[rule] = [sum(shadow.serve(prompt) for prompt in prompts) for _ in range(3)]
    assert hits[Rule.LRU] == [0, 0, 0]
    assert hits[Rule.RESIDENTS] == [0, 70, 70]


def test_a_smaller_shadow_gives_up_what_does_not_fit() -> None:
    shadow = Shadow(Rule.LRU, 40)
    for root in (0, 100, 200):
        shadow.serve(range(root, root + 10))
    shadow.capacity = 20
    assert shadow.serve(range(300, 310)) == 0
    assert sum(shadow.size(standing) for standing in Standing) == 20
    assert shadow.serve(range(200, 210)) == 10
    assert shadow.serve(range(10)) == 0
