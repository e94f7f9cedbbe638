"""Remedies of many misses, each applied: ``python -m tests.cachelab.twin.many_remedies``.

Random traffic is recorded: prompts that go on with one of the last sixty, in a pool that holds a
few. For every span that missed for want of a window or of memory a remedy is looked for; then the
run is replayed anew with each, and exactly the promised tokens must hit. Of the misses whose remedy
is the request itself (an edit, a parameter) some are sampled: each takes a replay of its own.
"""

import argparse
import logging
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.cachelab.twin.recorded_run import RecordedRun, small_settings
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.remedies import Counterfactuals
from vllm.cachelab.twin.trace_file import read_trace
from vllm.v1.messages import BYPASSED, FIRST_SEEN

_REASONS = ("window_not_retained", "window_evicted", "evicted")
_POOLS = (240, 300, 420)
_INTERVALS = ("0", "auto", "none")


class CrowdedRun(RecordedRun):
    """Traffic that misses: many conversations, short answers."""

    def _add(self, *, is_short: bool = False) -> None:
        rng = self._rng
        prompt: list[int] = []
        if self.prompts and rng.random() < 0.9:
            old = rng.choice(self.prompts[-60:])
            prompt = old[: rng.choice((len(old), len(old), rng.randrange(1, len(old) + 1)))]
        prompt = prompt + [rng.randrange(900) for _ in range(rng.choice((1, 40, 300, 700)))]
        prompt = prompt[:1500]
        self.prompts.append(prompt)
        logprobs = 1 if rng.random() < 0.02 else None
        self.add(prompt, max_tokens=rng.choice((1, 1, 4)), prompt_logprobs=logprobs)


def check(seed: int, num_requests: int, path: Path, num_edits: int) -> Counter[str]:
    """Check one run; returns how many remedies of each kind held, and misses without any."""
    settings = small_settings(
        num_blocks=_POOLS[seed % len(_POOLS)], interval=_INTERVALS[seed // 3 % len(_INTERVALS)]
    )
    CrowdedRun(path, settings, seed).run(num_requests)
    trace = read_trace(path)
    found = Counterfactuals(trace)
    promised: dict[tuple[str, int], dict[int, int]] = {}
    counts: Counter[str] = Counter()
    misses = ExactTwin(trace).run().misses
    for number, stats in misses.items():
        for reason in _REASONS:
            missed = stats.miss_tokens.get(reason, 0)
            if not missed:
                continue
            counts["misses"] += 1
            remedy = found.find(number, reason, missed, stats.num_cached_tokens)
            if remedy is None:
                counts["none"] += 1
                continue
            value = remedy.interval or remedy.num_blocks
            assert value is not None
            promised.setdefault((remedy.kind, value), {})[number] = remedy.cached_tokens
            counts[remedy.kind] += 1
    for key, by_number in promised.items():
        hit = ExactTwin(trace, found.settings(*key)).run().cached_tokens
        assert {number: hit[number] for number in by_number} == by_number, (seed, key)
    _check_own(seed, num_edits, found, counts)
    return counts


def _check_own(seed: int, count: int, found: Counterfactuals, counts: Counter[str]) -> None:
    """Check remedies that change the request itself, in a replay of the whole run."""
    trace = found.trace
    misses = ExactTwin(trace).run().misses
    candidates = [
        (number, reason)
        for number, stats in misses.items()
        for reason in (FIRST_SEEN, BYPASSED)
        if stats.miss_tokens.get(reason, 0)
    ]
    chosen = random.Random(seed).sample(candidates, min(count, len(candidates)))
    for number, reason in chosen:
        stats = misses[number]
        counts["misses"] += 1
        missed, cached = stats.miss_tokens[reason], stats.num_cached_tokens
        remedy = found.find(number, reason, missed, cached)
        if remedy is None:
            counts["none"] += 1
            continue
        changes = {number: found.changed(number, remedy)}
        hit = ExactTwin(trace, changes=changes).run().cached_tokens[number]
        assert hit == remedy.cached_tokens, (seed, number, remedy)
        counts[remedy.kind] += 1


def main() -> None:
    """Check runs until enough misses were sampled, and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--misses", type=int, default=500)
    parser.add_argument("--requests", type=int, default=800, help="Of a run.")
    parser.add_argument("--edits", type=int, default=8, help="Changed requests of a run.")
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    total: Counter[str] = Counter()
    seed = args.first_seed
    with tempfile.TemporaryDirectory() as folder:
        while total["misses"] < args.misses:
            total += check(seed, args.requests, Path(folder) / "trace.jsonl", args.edits)
            print(seed, dict(total), f"{time.process_time():.0f} s of CPU", flush=True)
            seed += 1


if __name__ == "__main__":
    main()
