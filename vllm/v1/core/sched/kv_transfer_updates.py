"""What a KV connector reports after a step: finished loads and stores, blocks that failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msgspec import structs

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.requests import Holdings, Requests
from vllm.v1.messages import EXTERNAL, PrefillStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class KVTransferUpdates:
    """Applies a connector's report.

    Attributes:
        held: The requests and what they hold.
        recomputes: Whether requests compute again what failed to load (policy "recompute"), or end
            with an error (policy "fail").
    """

    held: Holdings
    recomputes: bool

    def apply_finished(self, output: KVConnectorOutput) -> None:
        """Note loads that arrived, and free blocks that were held for a transfer."""
        requests = self.held.requests
        if self.held.connector is not None:
            self.held.connector.update_connector_output(output)
        for request_id in output.finished_recving or ():
            request = requests.by_id.get(request_id)
            if request is None:
                logger.warning("KV of unknown request %s arrived.", request_id)
            elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                requests.loaded_ids.add(request_id)
            elif request.is_finished():
                # Ended while its KV was on the way: its blocks waited for the writer.
                self.held.free_blocks(request)
        for request_id in output.failed_recving:
            request = requests.by_id.get(request_id)
            if request is not None and request.is_finished():
                self.held.free_blocks(request)
        for request_id in output.finished_sending or ():
            request = requests.by_id.get(request_id)
            if request is None:
                logger.warning("KV of unknown request %s was sent.", request_id)
            else:
                self.held.free_blocks(request)

    def apply_failed_loads(self, output: KVConnectorOutput) -> None:
        """Deal with requests of which nothing may be used that the connector loaded.

        Nothing of it was published, and the connector writes it no more.
        """
        request_ids, connector = output.failed_recving, self.held.connector
        if not request_ids:
            return
        requests = self.held.requests
        failed = [r for r in requests.find_loading() if r.request_id in request_ids]
        for request in failed:
            reason = EXTERNAL
            told = output.kv_connector_worker_meta
            if connector is not None and told is not None:
                reason = connector.hooks.why_failed(request.request_id, told)
            self._begin_anew(request, reason)
            requests.loaded_ids.add(request.request_id)
            requests.failed_load_ids.add(request.request_id)
        if not self.recomputes:
            self._refuse(failed)

    def _refuse(self, failed: Collection[Request]) -> None:
        # The failure is the end of the transfers: nothing writes their blocks any more.
        self.held.requests.remove(list(failed))
        for request in failed:
            reason = "KV blocks of the request failed to load from the connector."
            self.held.refuse(request, reason)

    def apply_failed(self, block_ids: set[int]) -> set[str]:
        """Deal with blocks that the connector could not load.

        Args:
            block_ids: Ids of the bad blocks.

        Returns:
            Running requests whose tokens of this step are void.
        """
        if not block_ids:
            return set()
        requests = self.held.requests
        bad_waiting = self._first_bad_tokens(requests.find_loading(), block_ids)
        bad_running = self._first_bad_tokens(requests.running, block_ids)
        affected = {**bad_waiting, **bad_running}
        if not affected:
            return set()
        logger.warning(
            "%d KV blocks failed to load; %d requests are affected.", len(block_ids), len(affected)
        )
        # Neither a bad block nor what was computed from it may serve another request.
        tainted = set(block_ids)
        for request, first_bad in affected.items():
            list_from = self.held.manager.coordinator.list_blocks_from
            tainted.update(list_from(request.request_id, first_bad))
        self.held.manager.block_pool.evict_blocks(tainted)
        if self.held.manager.coordinator.resumes_anywhere:
            lost = {} if self.recomputes else affected
            for request, first_bad in affected.items() if self.recomputes else ():
                request.resume_at(first_bad)
                # Of this step and of those that were scheduled behind it.
                request.discard_tokens_in_flight()
        else:
            # Loads end before a request runs: what its steps read has been overwritten since.
            lost = bad_running if self.recomputes else affected
            for request in bad_waiting:
                # What arrived of a checkpoint is of no use without the rest: it is looked up anew.
                self._begin_anew(request, EXTERNAL)
        if lost:
            self._refuse(lost)
        requests.failed_load_ids.update(r.request_id for r in bad_waiting if r not in lost)
        return {request.request_id for request in bad_running}

    def _begin_anew(self, request: Request, reason: str) -> None:
        """Let a request that loads forget what it was promised."""
        request.resume_at(0)
        if request.prefill_stats is not None:
            request.record_prefill_stats(_without_loads(request.prefill_stats, reason))

    def _first_bad_tokens(
        self, requests: Iterable[Request], block_ids: set[int]
    ) -> dict[Request, int]:
        """Return, for each request that uses a bad block, the tokens before the first of them."""
        find = self.held.manager.coordinator.find_first_token
        found = ((request, find(request.request_id, block_ids)) for request in requests)
        return {
            request: min(first, request.num_computed_tokens)
            for request, first in found
            if first is not None
        }


def _without_loads(stats: PrefillStats, reason: str) -> PrefillStats:
    """Return a record in which what a connector was to load is computed after all."""
    num_external = stats.num_external_tokens
    if not num_external:
        return stats
    misses = dict(stats.miss_tokens)
    misses[reason] = misses.get(reason, 0) + num_external
    return structs.replace(
        stats,
        num_cached_tokens=stats.num_cached_tokens - num_external,
        num_external_tokens=0,
        external_sources={},
        miss_tokens=misses,
    )


def finish_loading(requests: Requests, manager: KVCacheManager, request: Request) -> None:
    """Let a request whose KV arrived go on from it.

    Mutates:
        The request's computed tokens; blocks that arrived are published for other requests.
    """
    has_failed = requests.take_loaded(request)
    num_loaded = request.num_computed_tokens
    if has_failed and num_loaded == 0:
        # It waits like any other: no room is kept for what it would still need.
        requests.end_prefill(request)
        manager.free(request)
        return
    manager.cache_blocks(request, num_loaded)
    if num_loaded == request.num_tokens:
        # The last token is always computed: its logits give the next one.
        request.resume_at(num_loaded - 1)
