"""Remedies of many misses, each applied: ``python -m tests.benchmarks.twin.many_remedies``.

Random traffic is recorded; for every span that missed for want of a window or of memory a remedy is
looked for; then the run is replayed anew with each, and exactly the promised tokens must hit.
"""

import argparse
import logging
import tempfile
from collections import Counter
from pathlib import Path

from tests.benchmarks.twin.recorded_run import RecordedRun, small_settings
from vllm.benchmarks.twin.exact import ExactTwin
from vllm.benchmarks.twin.remedies import Counterfactuals
from vllm.benchmarks.twin.trace_file import read_trace

_REASONS = ("window_not_retained", "window_evicted", "evicted")


def check(seed: int, path: Path) -> Counter[str]:
    """Check one run; returns how many remedies of each kind held, and misses without any."""
    RecordedRun(path, small_settings(num_blocks=300, interval="0"), seed).run(80)
    trace = read_trace(path)
    found = Counterfactuals(trace)
    promised: dict[tuple[str, int], dict[int, int]] = {}
    counts: Counter[str] = Counter()
    for number, stats in ExactTwin(trace).run().misses.items():
        for reason in _REASONS:
            missed = stats.miss_tokens.get(reason, 0)
            if not missed:
                continue
            remedy = found.find(number, reason, missed, stats.num_cached_tokens)
            if remedy is None:
                counts["none"] += 1
                continue
            value = remedy.interval or remedy.num_blocks
            assert value is not None
            promised.setdefault((remedy.kind, value), {})[number] = remedy.cached_tokens
    for key, by_number in promised.items():
        hit = ExactTwin(trace, found.settings(*key)).run().cached_tokens
        assert {number: hit[number] for number in by_number} == by_number, (seed, key)
        counts[key[0]] += len(by_number)
    return counts


def main() -> None:
    """Check some seeds and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            total += check(seed, Path(folder) / f"{seed}.jsonl")
            print(seed, dict(total), flush=True)


if __name__ == "__main__":
    main()
