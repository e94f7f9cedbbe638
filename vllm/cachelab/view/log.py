"""What was used of the cache, by whom, and when."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm.cachelab.trace.names import response_id
from vllm.v1.core.kv_cache_utils import BlockHash

if TYPE_CHECKING:
    from vllm.cachelab.view.sources import PrefixSource
    from vllm.v1.messages import PrefillStats
    from vllm.v1.request import Request

# Prefixes whose use is remembered; the one used longest ago is forgotten first.
_MAX_USES = 8192
_NUM_ADMISSIONS = 24
HALF_LIFE_S = 120.0
# Prompt tokens over time are told in so many spans of so many seconds: ten minutes.
SPAN_S = 10.0
NUM_SPANS = 60


@dataclass(slots=True)
class Use:
    """How often a prefix was resumed at, and when last.

    Attributes:
        hits: Requests that resumed at its end.
        heat: The same, each counting half after every ``HALF_LIFE_S``; as of ``last_s``.
        last_s: Monotonic seconds of its last use: a hit, or the end of a request that made it.
    """

    hits: int = 0
    heat: float = 0.0
    last_s: float = 0.0

    def heat_at(self, now_s: float) -> float:
        """Return what is left of the heat."""
        return self.heat * float(0.5 ** ((now_s - self.last_s) / HALF_LIFE_S))

    def add(self, now_s: float, *, is_hit: bool) -> None:
        """Count a use."""
        self.heat = self.heat_at(now_s) + is_hit
        self.hits += is_hit
        self.last_s = now_s


class Admission(msgspec.Struct, frozen=True):
    """A request that was admitted, and where its prompt came from.

    Attributes:
        request_id: As in the response.
        at_s: Monotonic seconds.
        sources: Cached tokens by where they came from: "pool", "host", "disk", "external".
        misses: Tokens by reason.
        session: Its session, as its client names it; "": it does not.
    """

    request_id: str
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    sources: dict[str, int]
    misses: dict[str, int]
    session: str = ""


class TimeSpan(msgspec.Struct):
    """The prompts that were admitted within ``SPAN_S``.

    Attributes:
        number: The span begins at so many times ``SPAN_S``, in monotonic seconds.
        prompt_tokens: Of all of them.
        sources: Those that were cached by where they came from; the others were computed.
    """

    number: int
    prompt_tokens: int = 0
    sources: dict[str, int] = {}


@dataclass(slots=True)
class Totals:
    """Of all requests admitted so far."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sources: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class CacheLog:
    """Follows requests from their admission to their end.

    Owns: uses by prefix, the last admissions, the live requests it has seen.

    Attributes:
        source: Knows a request's prefixes.
        uses: By prefix.
        admissions: The last ones.
        totals: Of all.
        history: The last spans in which anything was admitted, the oldest first.
    """

    source: PrefixSource
    uses: OrderedDict[BlockHash, Use] = field(default_factory=OrderedDict)
    admissions: deque[Admission] = field(default_factory=lambda: deque(maxlen=_NUM_ADMISSIONS))
    totals: Totals = field(default_factory=Totals)
    history: deque[TimeSpan] = field(default_factory=lambda: deque(maxlen=NUM_SPANS))
    _live: dict[str, Request] = field(default_factory=dict)

    def admit(self, request: Request, stats: PrefillStats, now_s: float) -> None:
        """Note an admission."""
        self.sweep(now_s)
        self._live[request.request_id] = request
        cached, sources = stats.num_cached_tokens, stats.hit_sources()
        self.source.note(request)
        self._use(request, cached, now_s, is_hit=True)
        self.totals.requests += 1
        self.totals.prompt_tokens += stats.num_prompt_tokens
        self.totals.cached_tokens += cached
        self.totals.sources.update(sources)
        span = self._span_at(now_s)
        span.prompt_tokens += stats.num_prompt_tokens
        span.sources = dict(Counter(span.sources) + Counter(sources))
        self.admissions.append(
            Admission(
                response_id(request.request_id),
                now_s,
                stats.num_prompt_tokens,
                cached,
                sources,
                dict(stats.miss_tokens),
                request.options.session_id or "",
            )
        )

    def _span_at(self, now_s: float) -> TimeSpan:
        number = int(now_s // SPAN_S)
        if not self.history or self.history[-1].number != number:
            self.history.append(TimeSpan(number))
        return self.history[-1]

    def sweep(self, now_s: float) -> None:
        """Note which requests have ended: what they made was used last by then."""
        ended = [request for request in self._live.values() if request.is_finished()]
        for request in ended:
            del self._live[request.request_id]
            self.source.note(request)
            self._use(request, request.num_settled_tokens, now_s, is_hit=False)

    def _use(self, request: Request, num_tokens: int, now_s: float, *, is_hit: bool) -> None:
        hashes = self.source.hashes(request)
        index = min(num_tokens // self.source.unit, len(hashes)) - 1
        if index < 0:
            return
        key = hashes[index]
        self.uses.setdefault(key, Use(last_s=now_s)).add(now_s, is_hit=is_hit)
        self.uses.move_to_end(key)
        if len(self.uses) > _MAX_USES:
            self.uses.popitem(last=False)

    def holders(self) -> Iterator[tuple[BlockHash, str]]:
        """Iterate over the live requests, each at the deepest cached prefix that it holds."""
        for request in self._live.values():
            hashes = self.source.hashes(request)
            end = min(request.num_computed_tokens // self.source.unit, len(hashes))
            for index in range(end - 1, -1, -1):
                if self.source.block_of(hashes[index]) is not None:
                    yield hashes[index], response_id(request.request_id)
                    break
