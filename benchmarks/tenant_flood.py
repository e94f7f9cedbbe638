"""One tenant asks for 20 times its share: what the others' first tokens and hits become.

    python -m benchmarks.tenant_flood [--long-answers]

Four tenants of equal weight on a simulated server: the scheduler and the cache are the server's,
the time of a step is that of ``CostModel.published_a3``, so every run is the same. Three of them
have conversations whose prompts grow by turns, together at 60% of their shares. The fourth sends
new prompts: at its share (held), or at 20 times that (flood); its share is a quarter of what the
server does when all four ask for more than it can do (contest), where shares are measured too. With
``--long-answers`` the fourth sends short prompts for long answers, which hold all places that a
small server has.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from vllm.benchmarks.draws import Draws
from vllm.cachelab.sim.clock import ClockedRun, LoadRequest, SimResult
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.requests import PrefixUnits, SimRequest
from vllm.cachelab.sim.settings import SimSettings, find_hf_config
from vllm.config.tenants import Tenant, TenantsConfig
from vllm.v1.request import RequestStatus

SPAN = 256
OTHERS = ("a", "b", "c")
FLOODER = "flood"
LOAD = 0.6
START_SPANS, TURN_SPANS, NUM_TURNS = 8, 2, 8
NUM_OUTPUT = 64
# A conversation's prompt at its last turn; the flooder's prompts are as long as one half way.
FLOOD_SPANS = START_SPANS + TURN_SPANS * NUM_TURNS // 2


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        flood: Requests a second of the flooder.
        others: Requests a second of each other tenant.
        seconds: For how long.
        has_tenants: Whether the server knows of them.
        guaranteed: Share of the cache of each other tenant.
        flood_spans: Of the flooder's prompts.
        flood_output: Tokens of its answers.
        num_places: Requests that run at a time.
    """

    flood: float
    others: float
    seconds: float
    has_tenants: bool = True
    guaranteed: float = 0.0
    flood_spans: int = FLOOD_SPANS
    flood_output: int = NUM_OUTPUT
    num_places: int = 64

    def loads(self, seed: int, unit: int) -> list[SimRequest]:
        """Return the requests."""
        made: list[SimRequest] = []
        numbers = iter(range(1 << 30))
        for stream, name in enumerate((*OTHERS, FLOODER)):
            rate = self.flood if name == FLOODER else self.others
            draws = Draws(seed, stream)
            floods = name == FLOODER
            prompts = self._new_prompts(stream) if floods else turns(stream, draws)
            time_s = 0.0
            while rate:
                # A Poisson process, by thinning a fine grid: Draws has uniform numbers only.
                time_s += 0.1 / rate
                if time_s >= self.seconds:
                    break
                if draws.uniform() < 0.1:
                    spans = next(prompts)
                    number = next(numbers)
                    made.append(
                        SimRequest(
                            f"{name}-{number}",
                            len(spans) * SPAN,
                            self.flood_output if floods else NUM_OUTPUT,
                            PrefixUnits(number, spans, unit, SPAN),
                            time_s,
                            tenant=name,
                        )
                    )
        return made

    def run(self, blocks: int, seed: int = 0) -> tuple[SimResult, Counter[str]]:
        """Run it; returns what clients saw and the prompt tokens computed in the last minute."""
        tenants = TenantsConfig.of(
            *(Tenant(name, cache_guaranteed=self.guaranteed) for name in OTHERS), Tenant(FLOODER)
        )
        settings = SimSettings(
            find_hf_config("v4-flash"),
            num_blocks=blocks,
            max_model_len=16_384,
            scheduler={
                "max_num_seqs": self.num_places,
                "max_num_batched_tokens": 2048,
                "tenants": tenants if self.has_tenants else None,
            },
        )
        engine = SimEngine(settings, decode_stride=4)
        served: Counter[str] = Counter()
        stop = partial(engine.scheduler.finish_requests, None, RequestStatus.FINISHED_ABORTED)
        run = ClockedRun(engine, CostModel.published_a3(), interruptions=[(self.seconds, stop)])
        requests: list[LoadRequest] = list(self.loads(seed, engine.hash_unit))
        result = run.run(requests)
        for seen in result.seen:
            if seen.chunk_s and seen.start_s + seen.chunk_s[0] > self.seconds - 60:
                name = seen.request_id.split("-")[0]
                new = seen.num_prompt_tokens - (seen.usage.cached_tokens or 0)
                served[name] += new + (seen.usage.cached_tokens or 0) // 10
            in_time = sum(seen.start_s + s > self.seconds - 60 for s in seen.chunk_s)
            served[seen.request_id.split("-")[0]] += 4 * 4 * in_time
        return result, served

    def _new_prompts(self, stream: int) -> Iterator[list[int]]:
        ids = iter(range((stream + 1) << 40, (stream + 2) << 40))
        while True:
            yield [next(ids) for _ in range(self.flood_spans)]


def turns(stream: int, draws: Draws) -> Iterator[list[int]]:
    """Yield prompts of conversations that begin alike and are at different turns."""
    ids = iter(range((stream + 1) << 40, (stream + 2) << 40))
    start = [next(ids) for _ in range(START_SPANS)]
    open_: list[list[int]] = []
    while True:
        while len(open_) < 4:
            open_.append(list(start))
        chosen = open_[draws.below(len(open_))]
        chosen += [next(ids) for _ in range(TURN_SPANS)]
        yield list(chosen)
        if len(chosen) >= START_SPANS + TURN_SPANS * NUM_TURNS:
            open_.remove(chosen)


def describe(result: SimResult) -> dict[str, float]:
    """Return the others' figures."""
    seen = [s for s in result.seen if not s.request_id.startswith(FLOODER) and s.chunk_s]
    ttft = sorted(s.chunk_s[0] for s in seen)
    prompts = sum(s.num_prompt_tokens for s in seen)
    return {
        "requests": len(seen),
        "p50_ttft_ms": round(1000 * ttft[len(ttft) // 2], 1),
        "p90_ttft_ms": round(1000 * ttft[len(ttft) * 9 // 10], 1),
        "hit_percent": round(100 * sum(s.usage.cached_tokens or 0 for s in seen) / prompts, 2),
    }


def show(cases: dict[str, Case], blocks: int, seed: int) -> None:
    """Run cases and print the others' figures, beside those of the first."""
    print("| load | P50 TTFT ms | P90 | of held | hit % |\n|---|--:|--:|--:|--:|")
    held: dict[str, float] = {}
    for name, case in cases.items():
        row = describe(case.run(blocks, seed)[0])
        held = held or row
        ratio = row["p90_ttft_ms"] / held["p90_ttft_ms"]
        print(
            f"| {name} | {row['p50_ttft_ms']:.0f} | {row['p90_ttft_ms']:.0f} | {ratio:.2f} "
            f"| {row['hit_percent']:.1f} |",
            flush=True,
        )


def main() -> None:
    """Run all cases and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2400)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--long-answers", action="store_true")
    args = parser.parse_args()
    if args.long_answers:
        usual = Case(0.5, 0.5, args.seconds, True, 0.2, flood_spans=1, flood_output=512)
        usual = replace(usual, num_places=16)
        cases = {"held": usual, "20 times as many": replace(usual, flood=10)}
        show(cases, args.blocks, args.seed)
        return
    # More than the server can do, of everybody.
    contest, served = Case(20, 20, 90).run(args.blocks, args.seed)
    shares = {name: served[name] / sum(served.values()) for name in sorted(served)}
    num_done = Counter(s.request_id.split("-")[0] for s in contest.seen if s.latency_s)
    share = num_done[FLOODER] / 90
    others = LOAD * sum(num_done[name] for name in OTHERS) / len(OTHERS) / 90
    show(
        {
            "held to its share": Case(share, others, args.seconds, guaranteed=0.2),
            "20 times its share": Case(20 * share, others, args.seconds, guaranteed=0.2),
            "the same without shares of the cache": Case(20 * share, others, args.seconds),
            "the same without tenants": Case(20 * share, others, args.seconds, has_tenants=False),
        },
        args.blocks,
        args.seed,
    )
    print("Shares of all four: " + ", ".join(f"{100 * s:.1f}%" for s in shares.values()))


if __name__ == "__main__":
    main()
