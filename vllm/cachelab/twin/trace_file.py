"""Reading what ``--cache-trace`` wrote."""

from base64 import b64decode
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vllm.benchmarks.datasets.lines import BadLines
from vllm.cachelab.trace.events import (
    FORMAT,
    HASH_BYTES,
    OLD_VERSIONS,
    VERSION,
    Aborted,
    Added,
    Begun,
    Closed,
    DiskChange,
    DiskChanges,
    Ending,
    Event,
    Header,
    Step,
    Told,
    Units,
)
from vllm.cachelab.trace.names import response_id
from vllm.exceptions import ConfigError
from vllm.v1.core.kv_cache_utils import BlockHash

_NO_HASH = b""


@dataclass(slots=True)
class RecordedRequest:
    """One request of a trace.

    Attributes:
        added: As it was queued.
        hashes: Of its units, the answer's behind the prompt's.
        tokens: Number of the token at each unit's end, by position; empty: they do not matter.
        num_output_tokens: Of its answer; None: its end is not in the trace.
        is_aborted: Whether it was ended from outside, or never.
        cached_tokens: At its first admission; None: it was not admitted.
        told: Where its prompt's tokens came from, at its first admission; None: not recorded.
        step_counts: Tokens of each of its steps that brought any number but the usual, by how many
            it had before.
    """

    added: Added
    hashes: list[BlockHash] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int | None = None
    is_aborted: bool = True
    cached_tokens: int | None = None
    told: Told | None = None

    @property
    def request_id(self) -> str:
        """As the engine core knew it."""
        return self.added.request_id

    @property
    def response_id(self) -> str:
        """As the client knows it: the front end adds the prompt's number and unique parts."""
        return response_id(self.request_id)


@dataclass(slots=True)
class CacheTrace:
    """A trace in memory.

    Attributes:
        header: Of the first part read.
        events: In order.
        requests: By number.
        num_lost: Requests in steps whose beginning is in no part.
        is_whole: Whether nothing was dropped before the first part.
        bad: Lines that could not be read.
    """

    header: Header
    events: list[Event]
    requests: dict[int, RecordedRequest]
    bad: BadLines
    is_whole: bool = True
    num_lost: int = 0

    def steps(self) -> Iterator[Step]:
        """Yield the steps."""
        return (event for event in self.events if isinstance(event, Step))

    def disk_changes(self) -> Iterator[DiskChange]:
        """Yield what the disk's own thread did."""
        for event in self.events:
            if isinstance(event, DiskChanges):
                yield from event.changes

    def find(self, request_id: str) -> RecordedRequest:
        """Return a request by the id its client or the engine core knows.

        Raises:
            ConfigError: There is none.
        """
        for request in self.requests.values():
            if request_id in (request.request_id, request.response_id):
                return request
        raise ConfigError(
            f"request {request_id!r} is not in the trace: it was recorded before or "
            "after, or its part was dropped (--cache-trace-max-bytes)."
        )


class _Chains:
    """Puts chains of hashes together again."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes] = {}

    def read(self, units: Units) -> list[BlockHash] | None:
        """Return a whole chain; None if its beginning was never read."""
        raw = b64decode(units.hashes)
        new = [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
        known: list[bytes] = []
        at = b64decode(units.after)
        while at:
            known.append(at)
            parent = self._parents.get(at)
            if parent is None:
                return None
            at = parent
        if len(known) != units.num_known:
            return None
        known.reverse()
        parent = known[-1] if known else _NO_HASH
        for own in new:
            self._parents.setdefault(own, parent)
            parent = own
        return [BlockHash(h) for h in (*known, *new)]


def read_trace(path: Path, *, is_strict: bool = False) -> CacheTrace:
    """Read a trace, and the part before it where there is one.

    Raises:
        ConfigError: It is none, or of another version; with ``is_strict``, a line is bad.
    """
    old = path.with_name(path.name + ".1")
    bad = BadLines(path, is_strict)
    trace: CacheTrace | None = None
    chains = _Chains()
    known_ids: set[str] = set()
    for part in (old, path) if old.exists() else (path,):
        header, lines = _open_part(part, bad)
        if trace is None:
            trace = CacheTrace(header, [], {}, bad, is_whole=header.part == 0)
        for number, event in lines:
            if isinstance(event, Added):
                problem = _find_problem(trace, event, known_ids)
                if problem is not None:
                    bad.add(number, problem)
                    continue
                known_ids.add(event.request_id)
            trace.events.append(event)
            _take(trace, event, chains)
    assert trace is not None
    bad.report()
    return trace


def _find_problem(trace: CacheTrace, added: Added, known_ids: Set[str]) -> str | None:
    """Return why no scheduler would take a request; None: one would."""
    if added.number in trace.requests or added.request_id in known_ids:
        return f"request {added.number} ({added.request_id}) was added before"
    most = trace.header.max_model_len
    if not 0 < added.num_prompt_tokens <= most:
        return f"a prompt of {added.num_prompt_tokens} tokens, where 1 to {most} are taken"
    if added.max_tokens < 1:
        return f"an answer of at most {added.max_tokens} tokens"
    return None


def _open_part(path: Path, bad: BadLines) -> tuple[Header, Iterator[tuple[int, Event]]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    first, _, rest = raw.partition(b"\n")
    try:
        kind = msgspec.json.decode(first)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no cache trace: its first line is no JSON.") from error
    if not isinstance(kind, dict) or kind.get("format") != FORMAT:
        raise ConfigError(
            f"{path} is no cache trace: record one with vllm serve --cache-trace FILE. (Traces of "
            "requests are for vllm bench replay.)"
        )
    if kind.get("version") not in (VERSION, *OLD_VERSIONS):
        raise ConfigError(
            f"{path} is a cache trace of version {kind.get('version')}, written by server "
            f"{kind.get('server')}; this one reads version {VERSION}: record it again, or read it "
            "with that server."
        )
    try:
        header = msgspec.convert(kind, Header)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} has a header that is not whole: {error}.") from error
    return header, _lines(rest, bad)


def _lines(raw: bytes, bad: BadLines) -> Iterator[tuple[int, Event]]:
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    for number, line in enumerate(raw.split(b"\n"), start=2):
        if not line:
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, ValueError) as error:
            bad.add(number, str(error))


def _take(trace: CacheTrace, event: Event, chains: _Chains) -> None:
    """Note what an event says of requests."""
    match event:
        case Added():
            _take_arrival(trace, event, chains)
        case Begun():
            _take_step(trace, event)
        case Step():
            _take_step(trace, event)
            _take_endings(trace, event.ended, chains, is_aborted=False)
        case Aborted():
            _take_endings(trace, event.ended, chains, is_aborted=True)
        case Closed():
            _take_endings(trace, event.alive, chains, is_aborted=True)


def _take_arrival(trace: CacheTrace, event: Added, chains: _Chains) -> None:
    hashes = chains.read(event.units)
    request = RecordedRequest(event, hashes or [])
    _take_tokens(request, event.units, trace.header.hash_unit, 1)
    trace.requests[event.number] = request
    trace.num_lost += hashes is None


def _take_step(trace: CacheTrace, event: Begun | Step) -> None:
    for number, cached in event.admitted:
        if number in trace.requests:
            trace.requests[number].cached_tokens = cached
    for told in event.told:
        if told.number in trace.requests:
            trace.requests[told.number].told = told


def _take_endings(
    trace: CacheTrace, endings: list[Ending], chains: _Chains, *, is_aborted: bool
) -> None:
    unit = trace.header.hash_unit
    for ending in endings:
        request = trace.requests.get(ending.number)
        hashes = chains.read(ending.units)
        if request is None:
            trace.num_lost += 1
            continue
        request.num_output_tokens = ending.num_output_tokens
        request.is_aborted = is_aborted
        is_private = request.added.skips_insert
        if hashes is not None and len(hashes) >= (len(request.hashes) if is_private else 0):
            request.hashes = hashes
        first = 1 if is_private else -(-request.added.num_prompt_tokens // unit)
        _take_tokens(request, ending.units, unit, first)


def _take_tokens(request: RecordedRequest, units: Units, unit: int, first_end: int) -> None:
    raw = b64decode(units.next_tokens)
    for i in range(0, len(raw), 4):
        position = (first_end + i // 4) * unit
        request.tokens[position] = int.from_bytes(raw[i : i + 4], "little")
