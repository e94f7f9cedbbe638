"""What this engine asks of its own connectors' scheduler side, beyond the interface in ``base``.

A connector hands its hooks out as one object, so that whoever joins connectors joins these whole: a
hook that is added needs a default here and one line in ``JoinedHooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.metrics.stats import PullStats

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tier_view import TiersView
    from vllm.v1.messages import PopularPrefix
    from vllm.v1.metrics.stats import OffloadStats
    from vllm.v1.request import Request

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class AdmissionNote:
    """What a connector tells of a request that is admitted, for its record.

    Attributes:
        sources: Its loaded tokens by where they lie.
        miss_reason: Why no more of its prompt is loaded; None: nothing is known of it.
        miss_until: The token up to which that is the reason.
    """

    sources: Mapping[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    miss_until: int = 0

    @property
    def miss(self) -> tuple[str | None, int]:
        """The reason, and how far it holds."""
        return self.miss_reason, self.miss_until


@dataclass(frozen=True, slots=True)
class KeptPrefixes:
    """What tiers behind the pool gained and lost, for whoever shares requests out.

    Attributes:
        group_tokens: Tokens of a row group.
        stored: Prefixes that came, by kind: row groups (0), places to resume (1). Bytes 8 to 16 of
            their hashes, as a little-endian number.
        removed: Prefixes that went.
    """

    group_tokens: int
    stored: Mapping[int, Sequence[int]]
    removed: Mapping[int, Sequence[int]]


class ConnectorHooks:
    """Hooks of one connector; each does nothing where it is not defined.

    Attributes:
        drain_timeout_s: How long an engine that shuts down goes on for what the connector has yet
            to do, or what other engines may still fetch.
        shares_caches: Whether other engine cores are offered what is used most, and pulled from.
    """

    drain_timeout_s: float = 0.0
    shares_caches: bool = False

    def has_pending_work(self) -> bool:
        """Whether the workers may report something although no request waits or runs."""
        return False

    def withdraw(self, names: Sequence[str]) -> None:
        """Let go of what is held for other engines under these names; unknown ones are ignored."""
        return

    def begin_drain(self) -> None:
        """Begin what must be done before the end: the engine goes on for ``drain_timeout_s``."""
        return

    def begin_own_loads(self) -> None:
        """Take blocks for prefixes that no request asked for; called while a step is scheduled."""
        return

    def offer_popular(self, max_bytes: int) -> Sequence[PopularPrefix]:
        """Hold what is used most for another engine core to pull; the most used first."""
        return ()

    def take_popular(
        self,
        prefixes: Sequence[PopularPrefix],
        max_bytes: int,
        seconds: float,
        tell: Callable[[PullStats], None],
    ) -> None:
        """Pull what other engine cores hold, within a budget, and tell what came of it."""
        tell(PullStats())

    def take_pull_stats(self) -> PullStats | None:
        """Return what was pulled since the last call; None: nothing."""
        return None

    def explain_admission(self, request: Request) -> AdmissionNote | None:
        """Say where a request's loaded tokens lie, and why others were not loaded."""
        return None

    def why_failed(self, request_id: str, worker_meta: Any) -> str:
        """Return the reason of a miss, of a load that failed as a whole."""
        return "external"

    def take_stats(self) -> OffloadStats | None:
        """Return what tiers behind the pool did since the last call; None: there are none."""
        return None

    def view_tiers(self) -> TiersView | None:
        """Return what tiers behind the pool hold and did; None: there are none."""
        return None

    def take_kept(self) -> KeptPrefixes | None:
        """Drain what tiers behind the pool gained and lost; None: nothing, or there are none."""
        return None


class JoinedHooks(ConnectorHooks):
    """Hooks of several connectors as one. One at most has tiers, and one at most shares caches.

    Args:
        parts: Of each connector.
        loads: Which of them loads for which request.
        split: Returns each connector's part of what a worker told.
    """

    def __init__(
        self,
        parts: Sequence[ConnectorHooks],
        loads: Mapping[str, int],
        split: Callable[[Any], Sequence[Any]],
    ) -> None:
        self._parts = parts
        self._loads = loads
        self._split = split
        self.drain_timeout_s = max(part.drain_timeout_s for part in parts)
        self._sharing = next((part for part in parts if part.shares_caches), ConnectorHooks())
        self.shares_caches = self._sharing.shares_caches

    def has_pending_work(self) -> bool:
        """Whether one of them waits for its workers."""
        return any(part.has_pending_work() for part in self._parts)

    def withdraw(self, names: Sequence[str]) -> None:
        """Let go of what is held under these names."""
        for part in self._parts:
            part.withdraw(names)

    def begin_drain(self) -> None:
        """Tell all that the engine stops."""
        for part in self._parts:
            part.begin_drain()

    def begin_own_loads(self) -> None:
        """Let all take blocks."""
        for part in self._parts:
            part.begin_own_loads()

    def offer_popular(self, max_bytes: int) -> Sequence[PopularPrefix]:
        """Have the one that shares caches hold what is used most."""
        return self._sharing.offer_popular(max_bytes)

    def take_popular(
        self,
        prefixes: Sequence[PopularPrefix],
        max_bytes: int,
        seconds: float,
        tell: Callable[[PullStats], None],
    ) -> None:
        """Have the one that shares caches pull."""
        self._sharing.take_popular(prefixes, max_bytes, seconds, tell)

    def take_pull_stats(self) -> PullStats | None:
        """Return what that one pulled."""
        return self._sharing.take_pull_stats()

    def explain_admission(self, request: Request) -> AdmissionNote | None:
        """Say where loaded tokens lie; a connector that does not load says only what it missed."""
        chosen = self._loads.get(request.request_id)
        for index, part in enumerate(self._parts):
            note = part.explain_admission(request)
            if note is not None:
                return note if index == chosen else AdmissionNote({}, *note.miss)
        return None

    def why_failed(self, request_id: str, worker_meta: Any) -> str:
        """Return why the one failed that loaded."""
        chosen = self._loads.get(request_id)
        report = None if chosen is None else self._split(worker_meta)[chosen]
        if chosen is None or report is None:
            return super().why_failed(request_id, worker_meta)
        return self._parts[chosen].why_failed(request_id, report)

    def take_stats(self) -> OffloadStats | None:
        """Return the counts of the one that keeps tiers."""
        return _first(part.take_stats() for part in self._parts)

    def view_tiers(self) -> TiersView | None:
        """Return what the one that keeps tiers holds."""
        return _first(part.view_tiers() for part in self._parts)

    def take_kept(self) -> KeptPrefixes | None:
        """Drain the news of the one that keeps tiers."""
        return _first(part.take_kept() for part in self._parts)


def _first(answers: Iterable[_Answer | None]) -> _Answer | None:
    """Return what the only one says that says something."""
    return next((answer for answer in answers if answer is not None), None)
