"""Counts of admissions: where the tokens of admitted requests come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from vllm.v1.messages import (
    ABOVE_LAST_BOUNDARY,
    EVICTED_FROM_DISK,
    EXTERNAL,
    MISS_REASONS,
    PrefillStats,
)
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.hooks import AdmissionNote

# What a tier behind the pool would have brought.
_EXPLAINED_BY_TIERS = MISS_REASONS[
    MISS_REASONS.index(EVICTED_FROM_DISK) + 1 : MISS_REASONS.index(ABOVE_LAST_BOUNDARY)
]


class AdmissionStats:
    """Counts each admission once, however often the request was looked up before.

        token  0        local             + external     num_tokens
               |-- hit --|-- loaded --------|-- computed ---|
        local cache:      miss ("external")    miss (other reasons)
        connector:        hit                  miss

    Owns: the statistics since the last report.

    Args:
        counts: Whether statistics are gathered; a request's own record is, in any case.
        has_connector: Whether a KV connector's hits are counted.
    """

    def __init__(self, *, counts: bool, has_connector: bool) -> None:
        self._counts = counts
        self._has_connector = counts and has_connector
        self._local = PrefixCacheStats()
        self._external = PrefixCacheStats()

    def record_query(self, request: Request, num_local: int, num_external: int) -> None:
        """Count what the connector was asked for, and what it had.

        Args:
            request: The admitted request.
            num_local: Tokens of the local hit.
            num_external: Tokens beyond it that the connector loads.
        """
        if self._has_connector:
            self._external.record(
                num_tokens=request.num_tokens - num_local,
                num_hits=num_external,
                preempted=request.num_preemptions > 0,
            )

    def record_admission(
        self,
        request: Request,
        record: PrefillStats,
        num_local: int,
        num_external: int,
        note: AdmissionNote | None = None,
    ) -> None:
        """Count where the request's tokens come from, and note it for the client.

        A request whose connector failed to load what it promised is admitted a second time: the
        first record stays. Of ``n`` answers to one prompt the first counts, as in ``usage``: the
        others find what it computes.

        Args:
            request: The admitted request.
            record: What its manager noted, with what is loaded among the hits.
            num_local: Tokens of the local hit.
            num_external: Tokens beyond it that a connector loads.
            note: What the connector tells of them, and of the others.
        """
        is_resumed = request.num_preemptions > 0
        if request.prefill_stats is not None and not is_resumed:
            return
        if num_external:
            record = structs.replace(
                record,
                num_external_tokens=num_external,
                dense_match_tokens=min(record.dense_match_tokens, num_local),
            )
        if note is not None:
            misses = record.miss_tokens
            if note.miss_reason is not None:
                num_missed = note.miss_until - record.num_cached_tokens
                misses = _rename_misses(misses, note.miss_reason, num_missed)
            record = structs.replace(
                record, external_sources=dict(note.sources), miss_tokens=misses
            )
        request.record_prefill_stats(record)
        if not self._counts or request.is_extra_answer:
            return
        misses = record.miss_tokens
        if num_external:
            misses = {**misses, EXTERNAL: num_external}
        self._local.record(
            num_tokens=record.num_prompt_tokens,
            num_hits=record.num_cached_tokens - num_external,
            preempted=is_resumed,
            miss_tokens=misses,
            rebuild_saved_tokens=record.rebuild_saved_tokens,
        )

    def note_reset(self) -> None:
        """Hit rates over recent requests begin anew: the local cache was emptied."""
        self._local.reset = True

    def take(self) -> tuple[PrefixCacheStats, PrefixCacheStats | None]:
        """Drain the statistics of the local cache, and of the connector if there is one."""
        local, self._local = self._local, PrefixCacheStats()
        external, self._external = self._external, PrefixCacheStats()
        return local, external if self._has_connector else None


def _rename_misses(misses: Mapping[str, int], reason: str, num_tokens: int) -> dict[str, int]:
    """Give the first missed tokens of a prompt a reason that explains more than their own."""
    renamed = dict(misses)
    moved = 0
    for name in _EXPLAINED_BY_TIERS:
        count = min(renamed.get(name, 0), num_tokens - moved)
        if count > 0:
            moved += count
            renamed[name] -= count
            if not renamed[name]:
                del renamed[name]
    if moved:
        renamed[reason] = renamed.get(reason, 0) + moved
    return renamed
