"""Policies on made-up services that they were not made for: which share of prompt tokens hits?

    python -m benchmarks.held_out [--only NAME ...] [--pools 0.5 1.5 4] [--policies auto 0 1024 ...]
        [--model v4-flash] [--block-size 64] [--seed 7] [--write FOLDER]

Half of the services (*train*) may be looked at when a policy is changed; the other half
(*validation*) only says what came of it. ``--write`` writes the traces instead, in the Mooncake
project's form with 64 tokens under an id, for ``vllm bench replay --trace-block-size 64``. Prompts
alone are replayed. Prints a markdown table and one JSON line.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from benchmarks.result import print_result
from benchmarks.workloads import format_table
from vllm.benchmarks.datasets.lines import BadLines
from vllm.benchmarks.datasets.timed_trace import read_timed_trace
from vllm.benchmarks.replay import ReplayJob
from vllm.benchmarks.report.cache import cache_numbers
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.grid import Variant
from vllm.cachelab.sim.settings import SimSettings, find_hf_config

BLOCK = 64
POLICIES = ("auto", "0", "1024", "4096", "16384")
_GIB = 1 << 30


class Service:
    """A trace that is being written.

    Owns: the requests, the source of chance, the ids given out.

    Args:
        seed: Of all chance.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._ids = count(1)
        self._requests: list[tuple[float, list[int], int]] = []

    def fresh(self, low: int, high: int | None = None) -> list[int]:
        """Return tokens that were never sent, ``low`` or up to ``high``, as ids of whole blocks."""
        num_tokens = low if high is None else self.rng.randint(low, high)
        return [next(self._ids) for _ in range(max(1, num_tokens // BLOCK))]

    def ask(self, at_s: float, prompt: Sequence[int]) -> None:
        """Send a prompt, and a few tokens of its own behind it."""
        self._requests.append((at_s, list(prompt), self.rng.randint(1, BLOCK - 1)))

    def pick(self, number: int, skew: float) -> int:
        """Return one of ``number`` things, the first most often."""
        weights = [1 / (i + 1) ** skew for i in range(number)]
        return self.rng.choices(range(number), weights)[0]

    def chat(
        self,
        num_chats: int,
        systems: Sequence[list[int]],
        first_s: float,
        span_s: float,
        mean_turns: float = 5.0,
    ) -> None:
        """Let people talk, who begin at any time of ``span_s`` seconds."""
        rng = self.rng
        for _ in range(num_chats):
            at_s = first_s + rng.uniform(0, span_s)
            said = list(rng.choice(systems))
            for _ in range(max(1, round(rng.expovariate(1 / mean_turns)))):
                said += self.fresh(64, 700)
                self.ask(at_s, said)
                said += self.fresh(64, 400)
                at_s += rng.expovariate(1 / 25)

    def lines(self) -> list[str]:
        """Return the trace, by time."""
        return [
            json.dumps(
                {
                    "timestamp": round(at_s * 1000),
                    "input_length": len(prompt) * BLOCK + rest,
                    "output_length": 1,
                    "hash_ids": [*prompt, next(self._ids)],
                }
            )
            for at_s, prompt, rest in sorted(self._requests, key=lambda request: request[0])
        ]


# ---- train -----------------------------------------------------------------------------------


def zipf_chat(service: Service) -> None:
    """A few users ask most; system prompts have 100 to 6,000 tokens."""
    systems = [service.fresh(n) for n in (100, 400, 1000, 2500, 6000)]
    threads: dict[int, list[int]] = {}
    at_s = 0.0
    for _ in range(1000):
        at_s += service.rng.expovariate(1 / 1.5)
        user = service.pick(150, 0.9)
        if user not in threads or service.rng.random() < 0.12:
            threads[user] = list(systems[service.pick(5, 0.7)])
        said = threads[user]
        said += service.fresh(64, 900)
        service.ask(at_s, said)
        said += service.fresh(64, 500)
        if len(said) * BLOCK > 24_000:
            del threads[user]


def documents(service: Service) -> None:
    """A system prompt, some of 120 documents in any order, a question."""
    system = service.fresh(800)
    texts = [service.fresh(400, 2000) for _ in range(120)]
    for number in range(800):
        prompt = list(system)
        for _ in range(service.rng.randint(2, 5)):
            prompt += texts[service.pick(120, 1.0)]
        service.ask(number * 1.5, prompt + service.fresh(30, 200))


def agent_forks(service: Service) -> None:
    """A planner's context is forked by workers, and goes on with what they found."""
    rng = service.rng
    systems = [service.fresh(2000), service.fresh(4000)]
    for _ in range(30):
        at_s = rng.uniform(0, 1500)
        plan = rng.choice(systems) + service.fresh(300, 4000)
        for _ in range(rng.randint(1, 4)):
            service.ask(at_s, plan)
            ends = []
            for _ in range(rng.randint(2, 6)):
                work, now_s = plan + service.fresh(64, 500), at_s + 5 + rng.uniform(0, 3)
                for _ in range(rng.randint(1, 6)):
                    service.ask(now_s, work)
                    work = work + service.fresh(100, 1800)
                    now_s += rng.uniform(2, 12)
                ends.append(now_s)
            plan = plan + service.fresh(200, 1500)
            at_s = max(ends) + 2


def few_shot(service: Service) -> None:
    """Evaluations one after another, each with its examples and a short question."""
    at_s = 0.0
    for _ in range(10):
        examples = service.fresh(1500, 20_000)
        for _ in range(80):
            at_s += service.rng.uniform(0.5, 2)
            service.ask(at_s, examples + service.fresh(30, 600))


def chat_then_evaluation(service: Service) -> None:
    """Chat, an evaluation, chat."""
    systems = [service.fresh(500), service.fresh(1500)]
    service.chat(70, systems, 0, 500)
    examples = service.fresh(9000)
    for number in range(250):
        service.ask(600 + number * 1.2, examples + service.fresh(64, 900))
    service.chat(70, systems, 950, 500)


def single_prompts(service: Service) -> None:
    """Nothing comes back but a short system prompt."""
    system = service.fresh(300)
    for number in range(600):
        service.ask(number * 2, system + service.fresh(500, 9000))


# ---- validation ------------------------------------------------------------------------------


def long_documents(service: Service) -> None:
    """Documents of up to 40,000 tokens, some questions about each."""
    system = service.fresh(200)
    for _ in range(60):
        text = system + service.fresh(4000, 40_000)
        at_s = service.rng.uniform(0, 1500)
        for _ in range(max(1, round(service.rng.expovariate(1 / 8)))):
            service.ask(at_s, text + service.fresh(20, 120))
            at_s += service.rng.expovariate(1 / 60)


def edited_chats(service: Service) -> None:
    """Conversations in which earlier turns are edited, and the last one is sent again."""
    rng = service.rng
    systems = [service.fresh(300), service.fresh(3000)]
    for _ in range(120):
        at_s = rng.uniform(0, 1500)
        turns = [rng.choice(systems) + service.fresh(64, 900)]
        for _ in range(rng.randint(2, 12)):
            service.ask(at_s, list(chain.from_iterable(turns)))
            chance = rng.random()
            if chance < 0.2 and len(turns) > 1:
                turns = [*turns[: rng.randint(1, len(turns) - 1)], service.fresh(64, 700)]
            elif chance > 0.3:
                turns.append(service.fresh(128, 1300))
            at_s += rng.uniform(5, 70)


def bursts(service: Service) -> None:
    """Chats, and now and then many requests at once that share one long beginning."""
    service.chat(110, [service.fresh(700), service.fresh(1200)], 0, 1400)
    for number in range(14):
        shared = service.fresh(3000, 12_000)
        for _ in range(service.rng.randint(5, 40)):
            at_s = 50 + number * 100 + service.rng.uniform(0, 8)
            service.ask(at_s, shared + service.fresh(64, 400))


def tool_loops(service: Service) -> None:
    """Long loops of tool calls; a context that has grown too long is summed up."""
    system = service.fresh(5000)
    for _ in range(45):
        at_s = service.rng.uniform(0, 1500)
        context = system + service.fresh(200, 2000)
        for _ in range(service.rng.randint(5, 40)):
            service.ask(at_s, context)
            context = context + service.fresh(100, 2500)
            at_s += service.rng.expovariate(1 / 15)
            if len(context) * BLOCK > 36_000:
                context = system + service.fresh(1000, 3000)


def mixed(service: Service) -> None:
    """Chats, evaluations and single prompts at the same time."""
    systems = [service.fresh(n) for n in (200, 900, 3000)]
    service.chat(90, systems, 0, 1400, mean_turns=6)
    examples = [service.fresh(2000, 10_000) for _ in range(4)]
    for number in range(250):
        service.ask(number * 5.6, examples[number // 63] + service.fresh(64, 500))
    for number in range(250):
        service.ask(number * 5.6 + 2, service.fresh(500, 7000))


def four_phases(service: Service) -> None:
    """Documents, single prompts, prompts that take turns, chat."""
    texts = [service.fresh(500, 3000) for _ in range(50)]
    for number in range(200):
        chosen = [texts[service.pick(50, 0.9)] for _ in range(3)]
        service.ask(number * 1.5, [*chain.from_iterable(chosen), *service.fresh(60)])
    for number in range(120):
        service.ask(310 + number * 1.5, service.fresh(1000, 9000))
    loop = [service.fresh(2000, 9000) for _ in range(25)]
    for number in range(200):
        service.ask(500 + number * 1.5, loop[number % 25])
    service.chat(80, [service.fresh(600)], 820, 500)


TRAIN: Mapping[str, Callable[[Service], None]] = {
    make.__name__: make
    for make in (
        zipf_chat,
        documents,
        agent_forks,
        few_shot,
        chat_then_evaluation,
        single_prompts,
    )
}
VALIDATION: Mapping[str, Callable[[Service], None]] = {
    make.__name__: make
    for make in (long_documents, edited_chats, bursts, tool_loops, mixed, four_phases)
}


def make_trace(name: str, seed: int) -> list[str]:
    """Return the lines of a service's trace, by time."""
    service = Service(seed)
    (TRAIN | VALIDATION)[name](service)
    return service.lines()


def make_job(path: Path, model: str) -> ReplayJob:
    """Return the replay of a trace's prompts through one server."""
    read = read_timed_trace(path, block=BLOCK, every=1, limit=None, bad=BadLines(path, True))
    trace = tuple(replace(request, num_output_tokens=1) for request in read)
    longest = max(request.num_prompt_tokens for request in trace) + 2
    settings = SimSettings(
        find_hf_config(model),
        max_model_len=longest,
        scheduler={"max_num_batched_tokens": 8192, "max_num_seqs": 128},
    )
    return ReplayJob(trace, settings, CostModel.published_a3(), BLOCK)


def measure(job: ReplayJob, policy: str, block_size: int, gib: float) -> float:
    """Return the share of prompt tokens that hit."""
    seen = job.run(Variant(policy, block_size, int(gib * _GIB))).seen
    return float(cache_numbers(seen, [50])["hit_rate"])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*TRAIN, *VALIDATION]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--pools", nargs="+", type=float, default=[0.5, 1.5, 4.0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--model", default="v4-flash")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Replay everything, or write the traces."""
    args = parse_args(argv)
    rates: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            path = (args.write or Path(folder)) / f"{name}.jsonl"
            text = "".join(line + "\n" for line in make_trace(name, args.seed))
            path.write_text(text, encoding="utf-8")
            if args.write is not None:
                continue
            job = make_job(path, args.model)
            for gib in args.pools:
                rates[f"{name} {gib:g} GiB"] = {
                    policy: measure(job, policy, args.block_size, gib) for policy in args.policies
                }
    if args.write is None:
        print(format_table(rates, args.policies, [p for p in args.policies if p != "auto"]))
        print_result("held_out", {"model": args.model, "block_size": args.block_size}, rates)


if __name__ == "__main__":
    main()
