"""Traces in the form that the Mooncake project published.

One object a line: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens), ``hash_ids``
(one id per block of the prompt; equal ids mean equal tokens up to the block's end). In some traces
an id stands for the block's own tokens, whatever is before them: such ids are told apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.benchmarks.datasets.lines import BadLines, read_json_lines
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import Words
from vllm.benchmarks.draws import Draws

DEFAULT_BLOCK = 512
_STREAM = 1 << 40
_TAIL_STREAM = 1 << 41
# Nanoseconds since 1970 are below, whatever they were taken for.
_MAX_TIME_MS = 1 << 62


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One line of a trace.

    Attributes:
        arrival_s: When it came.
        num_prompt_tokens: Of its prompt.
        num_output_tokens: Of its answer.
        span_ids: One id per block of the prompt, a last partial one included.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    span_ids: tuple[int, ...]


def _parse(raw: dict[str, Any], block: int) -> TimedRequest:
    ids = raw["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("hash_ids must be a list of whole numbers from 0")
    lengths = [raw["input_length"], raw["output_length"]]
    if not all(type(n) is int for n in lengths):
        raise ValueError("input_length and output_length must be whole numbers")
    num_prompt, num_output = lengths
    if num_prompt < 1 or num_output < 0:
        raise ValueError(f"input_length={num_prompt}, output_length={num_output} is no request")
    if len(ids) * block < num_prompt:
        raise ValueError(
            f"{len(ids)} hash_ids are too few for {num_prompt} tokens: one per {block} is needed"
        )
    time_ms = raw.get("timestamp", 0)
    if isinstance(time_ms, bool) or not isinstance(time_ms, int | float):
        raise ValueError(f"timestamp={time_ms!r} is no number")
    # Also false for NaN, which no clock ever reaches.
    if not -_MAX_TIME_MS <= time_ms <= _MAX_TIME_MS:
        raise ValueError(f"timestamp={str(time_ms)[:20]} is no time in milliseconds")
    return TimedRequest(time_ms / 1000, num_prompt, num_output, tuple(ids))


class _PrefixIds:
    """Makes ids of whole prefixes of those that a trace gives.

    Ids that follow the same id wherever they stand, as in published traces, stay what they are.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def name(self, span_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return ids that are equal in two prompts only where all before them is, too."""
        named = []
        before = -1
        for span_id in span_ids:
            if self._before.setdefault(span_id, before) != before:
                span_id = _join(before, span_id)
            named.append(span_id)
            before = span_id
        return tuple(named)


def _join(before: int, span_id: int) -> int:
    """Return an id above all those that traces count."""
    digest = blake2b(f"{before} {span_id}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") | 1 << 127


def read_timed_trace(
    path: Path,
    *,
    block: int = DEFAULT_BLOCK,
    every: int = 1,
    limit: int | None = None,
    bad: BadLines | None = None,
) -> list[TimedRequest]:
    """Read a trace.

    Args:
        path: JSON lines.
        block: Tokens under one id.
        every: Only each such line.
        limit: At most so many requests.
        bad: Takes lines that are wrong; None: they are counted and logged.

    Raises:
        ConfigError: The file cannot be read, or with ``bad.is_strict`` a line is wrong.
    """
    bad = bad or BadLines(path)
    return list(iterate_timed_trace(path, block=block, every=every, limit=limit, bad=bad))


def iterate_timed_trace(
    path: Path, *, block: int, every: int, limit: int | None, bad: BadLines
) -> Iterator[TimedRequest]:
    """Read a trace, one request in memory at a time; see ``read_timed_trace``."""
    prefixes = _PrefixIds()
    lines = (
        replace(request, span_ids=prefixes.name(request.span_ids))
        for request in read_json_lines(path, lambda raw: _parse(raw, block), bad, every)
    )
    yield from lines if limit is None else islice(lines, limit)
    bad.report()


def trace_prompts(
    words: Words, trace: list[TimedRequest], seed: int, block: int
) -> list[BenchRequest]:
    """Make text of a trace: the same id is the same text, in every process."""
    known: dict[int, list[int]] = {}
    made = []
    for number, request in enumerate(trace):
        ids: list[int] = []
        for span_id in request.span_ids:
            if span_id not in known:
                known[span_id] = words.draw(Draws(seed, _STREAM + span_id), block)
            ids += known[span_id]
        room = max(1, request.num_prompt_tokens - words.num_special)
        if len(ids) < room:
            ids += words.draw(Draws(seed, _TAIL_STREAM + number), room - len(ids))
        ids = ids[:room]
        made.append(
            BenchRequest(
                words.text(ids),
                room + words.num_special,
                max(1, request.num_output_tokens),
                arrival_s=request.arrival_s,
            )
        )
    return made
