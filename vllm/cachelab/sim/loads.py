"""Loads for the simulated engine: traces, and the shape of prompts that come back."""

from collections.abc import Callable, Iterator, Sequence

from vllm.benchmarks.arrivals import trace_times_s
from vllm.benchmarks.datasets.synthetic import RepeatShape, repeat_ids
from vllm.benchmarks.datasets.timed_trace import TimedRequest
from vllm.benchmarks.draws import Draws
from vllm.cachelab.sim.requests import PrefixUnits, SimRequest, at_unit

# Tokens under one id of a made-up prompt: the smallest unit, so that every block size sees it all.
_SPAN = 32


def trace_load(
    trace: Sequence[TimedRequest], block: int, unit: int, speed: float = 1.0
) -> list[SimRequest]:
    """Return a trace's requests, at its times; infinite speed: all at once.

    Tokens behind the last whole block of a prompt count as its own: the id of a partial block says
    nothing of a longer prompt's.
    """
    times = (
        [0.0] * len(trace)
        if speed == float("inf")
        else trace_times_s([request.arrival_s for request in trace], speed)
    )
    return [
        SimRequest(
            str(number),
            request.num_prompt_tokens,
            max(1, request.num_output_tokens),
            PrefixUnits(number, *at_unit(request.span_ids, block, unit)),
            time,
        )
        for number, (request, time) in enumerate(zip(trace, times, strict=True))
    ]


class _Spans:
    """Words that are spans: what comes back of a prompt comes back in whole spans of 32 tokens."""

    is_exact = True
    num_special = 0

    def __init__(self) -> None:
        self._fresh: Iterator[int] = iter(range(1, 1 << 62))

    def draw(self, draws: Draws, count: int) -> list[int]:
        """Return spans that were never drawn before."""
        return [next(self._fresh) for _ in range(count)]

    def text(self, words: Sequence[int]) -> str:
        """Return nothing: spans have no text."""
        return ""

    def count(self, text: str) -> int:
        """Return the spans of a text."""
        return len(text)

    def fit(self, text: str, num_tokens: int) -> str:
        """Return the text as it is."""
        return text


def repeat_load(shape: RepeatShape, num_requests: int, unit: int, seed: int) -> list[SimRequest]:
    """Return prompts that come back, all at once; a limit of concurrency spreads them.

    An id stands for all tokens up to its end, as in traces: ids are chained over what is drawn.
    """
    spans = RepeatShape(
        shape.reading,
        -(-shape.input_len // _SPAN),
        shape.output_len,
        shape.share,
        shape.rate,
        shape.pool,
    )
    drawn = repeat_ids(_Spans(), spans, num_requests, seed)
    chain = _chained()
    return [
        SimRequest(
            str(number),
            shape.input_len,
            shape.output_len,
            PrefixUnits(number, *at_unit(chain(ids), _SPAN, unit)),
            turn=turn,
        )
        for number, (ids, turn) in enumerate(drawn)
    ]


def _chained() -> Callable[[Sequence[int]], list[int]]:
    """Return a function from spans to ids of the prefixes they end."""
    known: dict[tuple[int, int], int] = {}

    def chain(ids: Sequence[int]) -> list[int]:
        parent, made = 0, []
        for own in ids:
            parent = known.setdefault((parent, own), len(known) + 1)
            made.append(parent)
        return made

    return chain
