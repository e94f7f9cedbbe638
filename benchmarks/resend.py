"""Does every prompt hit as far as its blocks allow, when the pool is not under pressure?

    python -m benchmarks.resend [--units 32 64 128] [--quick]

With DeepSeek-V4-Flash's groups, for every unit:

* resend: a prompt of n tokens, served twice, hits the largest boundary <= n - 1, for every n from
  one unit + 1 to 2,100 and 400 lengths drawn up to 20,000;
* junction: of prompts that share k tokens and come one after another, the third hits the largest
  boundary <= k;
* chat: a next turn hits the last unit of prompt + answer. The answer's last token is sampled but
  never computed, so that is the largest boundary <= prompt + answer - 1.

Tokens are drawn and hashed as in a server. Prints each failure on stderr and one JSON line; exits
with 1 if anything failed.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from benchmarks.prefix_driver import Outcome, PrefixDriver
from benchmarks.result import print_result
from benchmarks.v4_cache import UNITS, flash_config
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

SEED = 0
LONGEST = 20_000
_VOCAB = 129_280


@dataclass
class Report:
    """Checks made and failed of one kind."""

    name: str
    num_checks: int = 0
    failures: list[str] = field(default_factory=list)

    def expect(self, case: str, outcome: Outcome, expected: int) -> None:
        """Count one check."""
        self.num_checks += 1
        if outcome.hit_tokens != expected:
            self.failures.append(
                f"{self.name} {case}: hit {outcome.hit_tokens}, expected {expected}"
            )


class Prompts:
    """Serves random prompts of one unit size, each case on an empty cache.

    Owns: the driver and the random numbers.
    """

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.rng = random.Random(SEED + unit)
        # Room for several of the longest prompts: nothing is evicted.
        self.driver = PrefixDriver(flash_config(unit, 4096), 2 * LONGEST)
        self.hasher = get_request_block_hasher(unit, sha256)
        self._number = 0

    def draw(self, num_tokens: int) -> list[int]:
        """Return random token ids."""
        return self.rng.choices(range(_VOCAB), k=num_tokens)

    def serve(self, tokens: Sequence[int], max_tokens: int = 1) -> Outcome:
        """Serve one prompt alone; its answer is zeros."""
        self._number += 1
        outcome = self.driver.serve(str(self._number), tokens, self.hasher, max_tokens)
        self.driver.outcomes.clear()
        return outcome

    def forget(self) -> None:
        """Empty the cache."""
        # The last request's copies have run.
        self.driver.manager.new_step_starts()
        assert self.driver.manager.reset_prefix_cache()

    def floor(self, position: int) -> int:
        """Return the largest boundary at or below a position."""
        return position // self.unit * self.unit


def check_resends(prompts: Prompts, lengths: Iterable[int]) -> Report:
    """Serve a prompt of each length twice."""
    report = Report("resend")
    for n in lengths:
        tokens = prompts.draw(n)
        first = prompts.serve(tokens)
        report.expect(f"unit {prompts.unit} n {n} first", first, 0)
        second = prompts.serve(tokens)
        report.expect(f"unit {prompts.unit} n {n}", second, prompts.floor(n - 1))
        prompts.forget()
    return report


def check_junctions(prompts: Prompts, shared_lengths: Iterable[int]) -> Report:
    """Serve five prompts that share k tokens and then differ, by 1 to 1,000 tokens."""
    report = Report("junction")
    for k in shared_lengths:
        shared = prompts.draw(k)
        for sighting in range(1, 6):
            # The first token after the shared ones differs for sure: k is exact.
            own = [sighting, *prompts.draw(prompts.rng.randrange(1000))]
            outcome = prompts.serve([*shared, *own])
            if sighting >= 3:
                case = f"unit {prompts.unit} k {k} sighting {sighting} of {k + len(own)} tokens"
                report.expect(case, outcome, prompts.floor(k))
        prompts.forget()
    return report


def check_chats(prompts: Prompts, cases: Iterable[tuple[int, int]]) -> Report:
    """Serve conversations of four turns; each sends prompt, answer and a new question."""
    report = Report("chat")
    for num_prompt, num_answer in cases:
        tokens = prompts.draw(num_prompt)
        expected = 0
        for turn in range(1, 5):
            outcome = prompts.serve(tokens, num_answer)
            case = f"unit {prompts.unit} prompt {num_prompt} answer {num_answer} turn {turn}"
            report.expect(case, outcome, expected)
            expected = prompts.floor(len(tokens) + num_answer - 1)
            question = [1, *prompts.draw(prompts.rng.randint(0, 300))]
            tokens = [*tokens, *([0] * num_answer), *question]
        prompts.forget()
    return report


def check_unit(unit: int, *, quick: bool) -> list[Report]:
    """Run all checks of one unit; ``quick`` runs a sample of them."""
    prompts = Prompts(unit)
    rng = random.Random(SEED)
    lengths = [*range(unit + 1, 2101), *(rng.randint(2101, LONGEST) for _ in range(400))]
    shared = [*range(unit, 1300, 7), *(rng.randint(1300, LONGEST) for _ in range(60))]
    chats = [(rng.randint(1, 3000), rng.randint(1, 300)) for _ in range(150)]
    if quick:
        lengths, shared, chats = lengths[::97][:24], shared[::31][:8], chats[:6]
    # Grouped by kind, slowest first; the bar is the only sign of life.
    return [
        check_resends(prompts, tqdm(lengths, desc=f"unit {unit} resend", disable=quick or None)),
        check_junctions(prompts, tqdm(shared, desc=f"unit {unit} junction", disable=quick or None)),
        check_chats(prompts, tqdm(chats, desc=f"unit {unit} chat", disable=quick or None)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print the JSON line.

    Returns:
        The exit status: 1 if a check failed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", nargs="+", type=int, choices=UNITS, default=list(UNITS))
    parser.add_argument("--quick", action="store_true", help="a sample, in a few seconds")
    args = parser.parse_args(argv)
    init_none_hash(sha256)
    values: dict[str, object] = {}
    num_failures = 0
    for unit in args.units:
        begin = time.perf_counter()
        for report in check_unit(unit, quick=args.quick):
            values[f"{report.name}_{unit}"] = {
                "checks": report.num_checks,
                "failures": len(report.failures),
            }
            num_failures += len(report.failures)
            for failure in report.failures:
                print(failure, file=sys.stderr)
        values[f"seconds_{unit}"] = round(time.perf_counter() - begin, 1)
    print_result("resend", {"units": args.units, "quick": args.quick, "seed": SEED}, values)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
