"""What requests have computed that is worth writing: row groups as they fill, states at pauses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.pool.exports import PlacedCheckpoint
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.records import ObjectKey

if TYPE_CHECKING:
    from vllm.v1.core.coordinator_interface import Coordinator
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

# What nobody asked for, and what a conversation has left behind.
NOT_WORTH = (
    CheckpointStanding.FILLER,
    CheckpointStanding.SPARE,
    CheckpointStanding.WARM,
    CheckpointStanding.SUPERSEDED,
)
# Orders that wait; the oldest go first, whose rows the pool gives up first too.
_MAX_WAITING = 8192
# Of the checkpoints that a prompt left in order to be resumed later.
_MAX_STATES = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that might be written.

    Attributes:
        key: Its name.
        block_hashes: Of the prompt it is of.
        first: The first token whose dense rows are in it.
        end: The boundary at which it stands.
        is_shared: Whether prompts were seen to part there.
        stays_in_memory: Whether its request wants it on no disk.
    """

    key: ObjectKey
    block_hashes: list[BlockHash]
    first: int
    end: int
    is_shared: bool = False
    stays_in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Passage:
    """How far a prompt went through what may be in the tiers.

    Attributes:
        block_hashes: Of the prompt.
        end: Its tokens.
        is_hit: Whether it began behind them; else it has computed them, or their last part.
    """

    block_hashes: list[BlockHash]
    end: int
    is_hit: bool


@dataclass(slots=True)
class _Track:
    """How far a request's rows have been considered.

    Attributes:
        request: The request.
        num_groups: Row groups.
        states_until: Tokens below which checkpoints were.
    """

    request: Request
    num_groups: int = 0
    states_until: int = 0


class Tracker:
    """The requests whose rows may be written, and the objects that wait for it.

    Owns: both.

    Args:
        coordinator: Knows what is cached.
        layout: What objects are made of.
        needs_next_token: Whether a drafter's rows are in a state, which are of the token behind.
    """

    def __init__(
        self, coordinator: Coordinator, layout: ObjectLayout, *, needs_next_token: bool
    ) -> None:
        self._coordinator = coordinator
        self._layout = layout
        self._needs_next_token = needs_next_token
        self._tracks: dict[str, _Track] = {}
        self._ended: list[_Track] = []
        self.waiting: deque[Candidate] = deque()
        self._passages: list[Passage] = []
        self.num_dropped = 0

    def add(self, request: Request) -> None:
        """Take note of a request, unless it leaves nothing in the cache, or spare prefixes."""
        leaves_little = request.skip_cache_insert or request.is_spare
        if not (request.skip_reading_prefix_cache or leaves_little):
            self._tracks[request.request_id] = _Track(request)

    def end(self, request: Request) -> None:
        """Take note that a request ends; what it leaves behind is published after this."""
        track = self._tracks.pop(request.request_id, None)
        if track is not None and request.num_computed_tokens > 0:
            self._ended.append(track)

    @property
    def has_ended(self) -> bool:
        """Whether requests have ended since the last look."""
        return bool(self._ended)

    def look(self, scheduled: Sequence[str], begun: Mapping[str, int]) -> None:
        """Queue what the requests of a step, and those that ended, have computed.

        Args:
            scheduled: The requests of the step.
            begun: Those of them that begin with it, and the tokens behind which they do.
        """
        for request_id, position in begun.items():
            track = self._tracks.get(request_id)
            if track is not None and position:
                self._passages.append(Passage(track.request.block_hashes, position, is_hit=True))
        for request_id in scheduled:
            track = self._tracks.get(request_id)
            if track is not None:
                request = track.request
                computed = request.num_computed_tokens - request.num_output_placeholders
                self._queue_rows(track, computed)
                if computed > request.num_prompt_tokens > track.states_until:
                    self._queue_states(track, request.num_prompt_tokens)
        ended, self._ended = self._ended, []
        for track in ended:
            num_tokens = len(track.request.block_hashes) * self._layout.unit
            self._queue_rows(track, num_tokens)
            self._queue_states(track, num_tokens)
            self._passages.append(Passage(track.request.block_hashes, num_tokens, is_hit=False))
        while len(self.waiting) > _MAX_WAITING:
            self.waiting.popleft()
            self.num_dropped += 1

    def take_passages(self) -> list[Passage]:
        """Drain how far requests went that began or ended."""
        passages, self._passages = self._passages, []
        return passages

    def _queue_rows(self, track: _Track, computed: int) -> None:
        size, unit = self._layout.group_tokens, self._layout.unit
        hashes, computed = track.request.block_hashes, min(computed, track.request.insert_end)
        while (end := (track.num_groups + 1) * size) <= min(computed, len(hashes) * unit):
            key = ObjectKey.of(ObjectKind.ROWS, hashes[end // unit - 1])
            stays = track.request.options.stays_in_memory
            self.waiting.append(Candidate(key, hashes, end - size, end, stays_in_memory=stays))
            track.num_groups += 1

    def _queue_states(self, track: _Track, end: int) -> None:
        hashes, unit, size = (
            track.request.block_hashes,
            self._layout.unit,
            self._layout.group_tokens,
        )
        chosen = self._choose_states(hashes, track.states_until, min(end, track.request.insert_end))
        for position, is_shared in chosen.items():
            key = ObjectKey.of(ObjectKind.STATE, hashes[position // unit - 1])
            first = position // size * size
            stays = track.request.options.stays_in_memory
            self.waiting.append(Candidate(key, hashes, first, position, is_shared, stays))
        track.states_until = end

    def _choose_states(self, hashes: list[BlockHash], start: int, end: int) -> dict[int, bool]:
        """Return the boundaries above ``start`` whose states are worth their bytes.

        Each with whether prompts were seen to part there.
        """
        if not self._layout.has_windows:
            # Every unit can be resumed at: the deepest serves all.
            position = min(end, len(hashes) * self._layout.unit) // self._layout.unit
            position *= self._layout.unit
            is_between = position > start and position % self._layout.group_tokens
            return {position: False} if is_between else {}
        found = [
            place
            for place in self._coordinator.list_checkpoints(hashes, end)
            if place.position > start and place.standing not in NOT_WORTH
        ]
        if self._needs_next_token:
            found = [place for place in found if place.next_token is not None]
        lean = [place for place in found if place.position % self._layout.lean == 0]
        # Where a lean one lies close below, computing the rest is cheaper than storing more.
        lone = [place for place in found if not _has_partner(place, lean, self._layout.lean)]
        chosen = {
            place.position
            for place in (*lean, *lone)
            if place.standing is CheckpointStanding.JUNCTION
        }
        last = sorted({place.position for place in (*lean, *lone)} - chosen)[-_MAX_STATES:]
        return {position: position in chosen for position in sorted({*chosen, *last})}


def _has_partner(place: PlacedCheckpoint, lean: Sequence[PlacedCheckpoint], step: int) -> bool:
    return any(other.position == place.position // step * step for other in lean)
