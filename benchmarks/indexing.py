"""What a job that makes vectors of documents does to the hits of chats beside it.

    python -m benchmarks.indexing [--seconds 200] [--chats 2] [--documents 1.5] [--blocks 2000]

The scheduler and the cache are the server's, the time of a step is that of
``CostModel.published_a3``: every run is the same. Chats are the conversations of ``tenant_flood``;
documents share an instruction, are computed and leave spare boundaries, as requests for vectors do.
The last row is the same job by requests that leave what chats leave. The pool holds the
conversations that are open, and the texts that run.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from benchmarks.tenant_flood import turns
from vllm.benchmarks.draws import Draws
from vllm.cachelab.sim.clock import ClockedRun, LoadRequest
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.requests import PrefixUnits, SimRequest
from vllm.cachelab.sim.settings import SimSettings, find_hf_config
from vllm.v1.request import RequestStatus
from vllm.v1.request_options import NO_OPTIONS, RequestOptions

SPAN = 256
DOCUMENT_SPANS = 8
NUM_OUTPUT = 64
NUM_STREAMS = 4
SPARE = RequestOptions(is_spare=True)
_FIRST_DOCUMENT = 1 << 50


def make_chats(rate: float, seconds: float, unit: int) -> Iterator[SimRequest]:
    """Yield the turns of conversations of several clients, so many a second together."""
    number = 0
    for stream in range(NUM_STREAMS):
        draws, time_s = Draws(0, stream), 0.0
        prompts = turns(stream, draws)
        # A Poisson process, by thinning a fine grid: Draws has uniform numbers only.
        while (time_s := time_s + 0.1 * NUM_STREAMS / rate) < seconds:
            if draws.uniform() < 0.1:
                spans, number = next(prompts), number + 1
                units = PrefixUnits(number, spans, unit, SPAN)
                yield SimRequest(f"chat-{number}", len(spans) * SPAN, NUM_OUTPUT, units, time_s)


def make_documents(
    rate: float, seconds: float, unit: int, options: RequestOptions
) -> Iterator[SimRequest]:
    """Yield texts behind one instruction, evenly in time."""
    for number in range(int(rate * seconds)):
        own = [_FIRST_DOCUMENT + number * DOCUMENT_SPANS + i for i in range(DOCUMENT_SPANS)]
        spans = [_FIRST_DOCUMENT - 1, *own]
        units = PrefixUnits((1 << 20) + number, spans, unit, SPAN)
        yield SimRequest(
            f"text-{number}", len(spans) * SPAN, 1, units, number / rate, options=options
        )


def run(args: argparse.Namespace, documents: float, options: RequestOptions) -> dict[str, float]:
    """Return what chats saw, and how many texts were done."""
    settings = SimSettings(
        find_hf_config("v4-flash"),
        num_blocks=args.blocks,
        max_model_len=16_384,
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    )
    engine = SimEngine(settings, decode_stride=4)
    unit = engine.hash_unit
    requests: list[LoadRequest] = list(make_chats(args.chats, args.seconds, unit))
    requests += make_documents(documents, args.seconds, unit, options)
    stop = partial(engine.scheduler.finish_requests, None, RequestStatus.FINISHED_ABORTED)
    clocked = ClockedRun(engine, CostModel.published_a3(), interruptions=[(args.seconds, stop)])
    seen = [one for one in clocked.run(requests).seen if one.chunk_s]
    chats = [one for one in seen if one.request_id.startswith("chat")]
    ttft = sorted(one.chunk_s[0] for one in chats)
    return {
        "chats": len(chats),
        "hit %": 100
        * sum(one.usage.cached_tokens or 0 for one in chats)
        / sum(one.num_prompt_tokens for one in chats),
        "P50 TTFT ms": 1000 * ttft[len(ttft) // 2],
        "texts": len(seen) - len(chats),
    }


def main() -> None:
    """Run the chats alone, beside the job, and beside one that leaves what chats leave."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--chats", type=float, default=2.0, help="A second.")
    parser.add_argument("--documents", type=float, default=1.5, help="A second.")
    parser.add_argument("--blocks", type=int, default=2000)
    args = parser.parse_args()
    rows = (
        ("chats alone", 0.0, NO_OPTIONS),
        ("beside vectors", args.documents, SPARE),
        ("beside prompts of chats", args.documents, NO_OPTIONS),
    )
    for index, (name, documents, options) in enumerate(rows):
        values = run(args, documents, options)
        if not index:
            print(f"| | {' | '.join(values)} |\n|---|{'--:|' * len(values)}")
        print(f"| {name} | {' | '.join(f'{v:.1f}' for v in values.values())} |", flush=True)


if __name__ == "__main__":
    main()
