"""What would have made a request hit: found by replaying the run with it, or not named at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.rebuild import settings_of
from vllm.cachelab.twin.trace_file import CacheTrace, RecordedRequest
from vllm.exceptions import ConfigError
from vllm.v1.messages import (
    BYPASSED,
    EVICTED,
    FIRST_SEEN,
    STATE_EVICTED,
    STATE_NOT_RETAINED,
    WINDOW_EVICTED,
    WINDOW_NOT_RETAINED,
    WINDOW_PARTIAL,
)

_GIB = 1 << 30
# Cheapest first: a wide grid keeps few checkpoints, and a pool grows by little.
INTERVALS = (16_384, 8192, 4096, 2048, 1024, 512, 256, 128)
GROWTHS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
# What a remedy must bring back of the tokens it is for.
_WORTH = 0.5


@dataclass(frozen=True, slots=True)
class SuggestedChange:
    """A change, and what it does.

    Attributes:
        kind: "interval", "pool", "edit" or "parameters".
        text: What to do.
        cached_tokens: What the request hits with it, by replay.
        interval: Of the kind "interval".
        num_blocks: Of the kind "pool".
        edit_at: Of the kind "edit": token at which the prompt leaves an earlier one.
    """

    kind: str
    text: str
    cached_tokens: int
    interval: int | None = None
    num_blocks: int | None = None
    edit_at: int | None = None


class Counterfactuals:
    """Replays of one trace under changes; each change of settings is replayed once for all.

    Owns: the cached tokens by request under every change tried.

    Args:
        trace: What was recorded.
    """

    def __init__(self, trace: CacheTrace) -> None:
        self.trace = trace
        self._base = settings_of(trace.header)
        self._tried: dict[tuple[str, int], dict[int, int]] = {}

    def settings(self, kind: str, value: int) -> SimSettings:
        """Return the recorded settings with one changed."""
        if kind == "interval":
            return replace(self._base, interval=value)
        return self._base.resized(value)

    def cached(self, kind: str, value: int) -> dict[int, int]:
        """Return the cached tokens of every request with one setting changed.

        A change that the model does not allow (an interval that is no multiple of its unit) gives
        none.
        """
        key = (kind, value)
        if key not in self._tried:
            try:
                twin = ExactTwin(self.trace, self.settings(kind, value))
                self._tried[key] = twin.run().cached_tokens
            except ConfigError:
                self._tried[key] = {}
        return self._tried[key]

    def cached_after_edit(self, number: int, changed: RecordedRequest) -> int:
        """Return what one request hits when it is another one; the run ends at its admission."""
        twin = ExactTwin(self.trace, changes={number: changed})
        for event in self.trace.events:
            twin.feed(event)
            if number in twin.result.cached_tokens:
                break
        return twin.result.cached_tokens.get(number, 0)

    # ---- remedies ----------------------------------------------------------------------------

    def find(self, number: int, reason: str, missed: int, cached: int) -> SuggestedChange | None:
        """Return the cheapest remedy for one reason's tokens; None if none was found.

        Args:
            number: The request.
            reason: Why the tokens missed.
            missed: How many.
            cached: What the request hits as it is.
        """
        num_prompt_tokens = self.trace.requests[number].added.num_prompt_tokens
        wanted = cached + max(1, int(missed * _WORTH))
        if reason == BYPASSED:
            return self._without_bypass(number, cached)
        if reason == FIRST_SEEN:
            return self._edit(number, cached)
        kinds = {
            WINDOW_PARTIAL: ("interval",),
            WINDOW_NOT_RETAINED: ("interval",),
            WINDOW_EVICTED: ("pool", "interval"),
            STATE_NOT_RETAINED: ("interval",),
            STATE_EVICTED: ("pool", "interval"),
            EVICTED: ("pool",),
        }.get(reason, ())
        for kind in kinds:
            for value, text in self._candidates(kind):
                if kind == "interval" and value >= num_prompt_tokens:
                    continue  # it leaves nothing within the prompt
                found = self.cached(kind, value).get(number, 0)
                if found >= wanted:
                    return SuggestedChange(
                        kind,
                        text,
                        found,
                        interval=value if kind == "interval" else None,
                        num_blocks=value if kind == "pool" else None,
                    )
        return None

    def _candidates(self, kind: str) -> Iterator[tuple[int, str]]:
        if kind == "interval":
            for interval in INTERVALS:
                yield interval, f"--prefix-cache-retention-interval {interval}"
            return
        num_blocks = int(self.trace.header.cache["num_blocks"])
        block_bytes = int(self.trace.header.cache["block_bytes"])
        for growth in GROWTHS:
            wanted = int(num_blocks * growth)
            more = (wanted - num_blocks) * block_bytes
            yield (
                wanted,
                f"--kv-cache-memory-bytes {wanted * block_bytes} ({more / _GIB:.3g} GiB more)",
            )

    def _without_bypass(self, number: int, cached: int) -> SuggestedChange | None:
        found = self.cached_after_edit(number, self._reading(number))
        if found <= cached:
            return None
        return SuggestedChange("parameters", "leave prompt_logprobs out", found)

    def _edit(self, number: int, cached: int) -> SuggestedChange | None:
        """Return what the request would hit if it went on like an earlier one it shares with."""
        recorded = self.trace.requests[number]
        other, shared = self._nearest(number)
        if other is None or not shared:
            return None
        found = self.cached_after_edit(number, self._edited(number, other, shared))
        unit = self.trace.header.hash_unit
        if found <= cached or found <= shared * unit:
            return None
        first, last = shared * unit, min((shared + 1) * unit, recorded.added.num_prompt_tokens)
        text = (
            f"the prompt leaves an earlier one between tokens {first} and {last}: written the same "
            f"there and behind, it hits {found}"
        )
        return SuggestedChange("edit", text, found, edit_at=first)

    def _nearest(self, number: int) -> tuple[RecordedRequest | None, int]:
        """Return the earlier request that shares most units with one, and how many."""
        own = self.trace.requests[number].hashes
        best: tuple[RecordedRequest | None, int] = (None, 0)
        for other_number, other in self.trace.requests.items():
            if other_number >= number:
                break
            shared = _num_shared(own, other.hashes)
            if len(other.hashes) > shared >= max(1, best[1]):
                best = (other, shared)
        return best

    def changed(self, number: int, remedy: SuggestedChange) -> RecordedRequest:
        """Return the request that a remedy of the kind "edit" or "parameters" speaks of."""
        other, shared = self._nearest(number)
        if remedy.kind == "parameters" or other is None:
            return self._reading(number)
        return self._edited(number, other, shared)

    def _reading(self, number: int) -> RecordedRequest:
        """Return a request that reads the cache, whatever it asked for."""
        recorded = self.trace.requests[number]
        added = structs.replace(recorded.added, skips_cache=False, num_scores=None)
        return replace(recorded, added=added)

    def _edited(self, number: int, other: RecordedRequest, shared: int) -> RecordedRequest:
        """Return a request that goes on like another one behind the units they share."""
        recorded = self.trace.requests[number]
        unit = self.trace.header.hash_unit
        num_units = recorded.added.num_prompt_tokens // unit
        tail = other.hashes[shared:num_units]
        # Behind the other one's end nothing is known; its own units there would not follow.
        return replace(recorded, hashes=[*recorded.hashes[:shared], *tail])


def _num_shared(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Return how many leading units are equal; hashes are chained, so halving finds it."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
