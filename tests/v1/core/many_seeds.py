"""Random traffic over the control plane, seed by seed: does any request read a wrong row?

    python -m tests.v1.core.many_seeds [--seeds 1000] [--first 0] [--geometry v4|v4-short|gemma|...]

Every stored row is tagged with the prefix it was computed from, and every row that a step reads is
checked; so are I1..I7 after each step. A seed stands for a unit (32, 64, 128), FCFS or priority,
a retention policy, pins (in half of the seeds, with a cap of a quarter or all of the pool) and a
pool so small that everything is evicted, copied and preempted all the time. Victims of preemption
are drawn at random under either order. Stops at the first wrong read; prints totals otherwise.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tqdm import tqdm

from tests.v1.core.recurrent_geometry import recurrent_config
from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.v41_geometry import v41_config
from tests.v1.core.window_geometry import (
    GEMMA_LIKE,
    GPT_OSS_LIKE,
    LLAMA_LIKE,
    MISTRAL_LIKE,
    window_config,
)
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.kv_cache_interface import KVCacheConfig

UNITS = (32, 64, 128)
MAX_MODEL_LEN = 1024
_POLICIES = ("auto", "0", "256", "none")
MakeConfig = Callable[[int, int], KVCacheConfig]
GEOMETRIES: Mapping[str, MakeConfig] = {
    "v4": v4_config,
    "v4-short": partial(v4_config, length=16),
    "v4.1": v41_config,
    "v4.1-short": partial(v41_config, length=16),
    "gpt-oss-short": partial(window_config, window=32, kinds=GPT_OSS_LIKE),
    "gemma": partial(window_config, window=200, kinds=GEMMA_LIKE),
    "gpt-oss": partial(window_config, window=128, kinds=GPT_OSS_LIKE),
    "llama": partial(window_config, window=0, kinds=LLAMA_LIKE),
    "mistral": partial(window_config, window=100, kinds=MISTRAL_LIKE),
    "qwen3.5": recurrent_config,
    "glm": partial(recurrent_config, pool_size=4),
}
# Where computing windows again pays even in prompts as short as these: every policy tries.
SHORT_WINDOWS = ("v4-short", "v4.1-short", "gpt-oss-short")
_PINNED_SHARES = (None, 0.25, None, 1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a run is about.

    Attributes:
        make_config: Unit and blocks -> the cache: DeepSeek-V4's, or full attention and windows.
        unit: Tokens of the smallest hit.
        is_priority: Whether requests are admitted by priority.
        policy: What the cache keeps, as operators write it.
        pinning: What it pins.
        rebuilds: Whether it computes windows again whatever the policy.
    """

    unit: int
    is_priority: bool
    policy: str | int
    pinning: PinSettings | None
    rebuilds: bool
    make_config: MakeConfig

    @classmethod
    def of_seed(cls, seed: int, geometry_name: str = "v4") -> "Traffic":
        """Return what a seed stands for; 96 seeds in a row cover all combinations."""
        make_config = GEOMETRIES[geometry_name]
        seed, unit = divmod(seed, len(UNITS))
        seed, is_priority = divmod(seed, 2)
        seed, name = divmod(seed, len(_POLICIES))
        share = _PINNED_SHARES[seed % len(_PINNED_SHARES)]
        return cls(
            UNITS[unit],
            bool(is_priority),
            _POLICIES[name],
            # Few blocks are enough to pin: with these short chunks 16 would be seldom.
            None if share is None else PinSettings(share, 8),
            geometry_name in SHORT_WINDOWS,
            make_config,
        )

    def make_policy(self, geometry: CacheGeometry) -> RetentionPolicy:
        """Return a new policy."""
        policy = make_policy(self.policy, geometry, 100)
        if self.rebuilds:
            policy.rebuild_tokens = geometry.rebuild_tokens
        return policy


def tokens_of(seed: int, n: int) -> list[int]:
    """Return a prompt of ``n`` tokens."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(n)]


def run_random_traffic(seed: int, traffic: Traffic | None = None) -> Driver:
    """Serve multi-turn, fan-out and edited prompts in a tight pool, to the end.

    Args:
        seed: Of everything random.
        traffic: What the run is about; None: what the seed stands for.
    """
    traffic = traffic or Traffic.of_seed(seed)
    rng = random.Random(seed)
    geometry = CacheGeometry.from_config(traffic.make_config(traffic.unit, 10))
    tight = max_request_blocks(geometry, MAX_MODEL_LEN) + 2
    driver = Driver(
        traffic.make_config(traffic.unit, tight + rng.randrange(60)),
        MAX_MODEL_LEN,
        seed,
        policy=traffic.make_policy,
        pinning=traffic.pinning,
        is_priority=traffic.is_priority,
        rule=rng.choice((None, *Rule)) if traffic.policy == "auto" else None,
    )
    histories = [tokens_of(seed * 100 + i, rng.randrange(1, 300)) for i in range(3)]
    for _ in range(25):
        base = list(rng.choice(histories))
        kind = rng.random()
        if kind < 0.3 and base:  # an edited prompt
            base[rng.randrange(len(base))] = 2000
        elif kind < 0.6:  # a shorter sibling
            base = base[: rng.randrange(1, len(base) + 1)]
        tail = tokens_of(rng.randrange(10**6), rng.randrange(0, 120))
        prompt = (base + tail)[: MAX_MODEL_LEN - 40]
        request = driver.add(prompt or [1], rng.randrange(1, 40), priority=rng.randrange(3))
        for _ in range(rng.randrange(6)):
            driver.step(rng.choice([40, 130, 512]))
        if rng.random() < 0.1 and driver.running:
            driver.finish(rng.choice(driver.running))
        done = driver.finished.get(request.request_id)
        if done:
            histories.append(done)
    driver.run_all(budget=300)
    _check_totals(driver)
    return driver


def _check_totals(driver: Driver) -> None:
    assert driver.manager.usage == 0
    assert driver.memory.num_rows_read > 1000
    # Each admission's tokens were found to add up.
    assert driver.records.keys() == driver.hits.keys()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the seeds and print the totals as one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--geometry", choices=tuple(GEOMETRIES), default="v4")
    args = parser.parse_args(argv)
    totals: Counter[str] = Counter()
    begin = time.perf_counter()
    seeds = range(args.first, args.first + args.seeds)
    for seed in tqdm(seeds, desc="seeds", mininterval=2.0):
        try:
            driver = run_random_traffic(seed, Traffic.of_seed(seed, args.geometry))
        except Exception as error:
            error.add_note(f"seed {seed}: {Traffic.of_seed(seed, args.geometry)}")
            raise
        totals["requests"] += len(driver.hits)
        totals["steps"] += driver.num_steps
        totals["rows_read"] += driver.memory.num_rows_read
        totals["requests_that_hit"] += sum(hit > 0 for hit in driver.hits.values())
        totals["hit_tokens"] += sum(driver.hits.values())
        totals["requests_that_rebuilt"] += len(driver.rebuilt)
        totals["block_copies"] += driver.num_copies
        totals["preemptions"] += driver.num_preemptions
        totals["seeds_under_priority"] += driver.is_priority
        totals["seeds_with_pins"] += driver.peak_pins > 0
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"seeds": args.seeds, "wrong_reads": 0, **totals, "seconds": seconds}))


if __name__ == "__main__":
    main()
