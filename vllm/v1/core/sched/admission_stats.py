"""Counts of admissions: where the tokens of admitted requests come from."""

from __future__ import annotations

from msgspec import structs

from vllm.v1.messages import PrefillStats
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request

# The reason, in the local cache's statistics, of tokens that a connector loads.
EXTERNAL = "external"


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
        self, request: Request, record: PrefillStats, num_local: int, num_external: int
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
