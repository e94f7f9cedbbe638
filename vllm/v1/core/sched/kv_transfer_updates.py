"""What a KV connector reports after a step: finished loads and stores, blocks that failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)


def apply_finished_transfers(scheduler: Scheduler, output: KVConnectorOutput) -> None:
    """Note loads that arrived, and free blocks that were held for a transfer.

    Mutates:
        ``finished_recving_kv_req_ids``, and ``requests`` where a finished one is let go.
    """
    if scheduler.connector is not None:
        scheduler.connector.update_connector_output(output)
    for request_id in output.finished_recving or ():
        request = scheduler.requests.get(request_id)
        if request is None:
            logger.warning("KV of unknown request %s arrived.", request_id)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            scheduler.finished_recving_kv_req_ids.add(request_id)
        elif request.is_finished():
            # Ended while its KV was on the way: its blocks waited for the writer.
            scheduler._free_blocks(request)
    for request_id in output.finished_sending or ():
        request = scheduler.requests.get(request_id)
        if request is None:
            logger.warning("KV of unknown request %s was sent.", request_id)
        else:
            scheduler._free_blocks(request)


def apply_failed_loads(scheduler: Scheduler, block_ids: set[int]) -> set[str]:
    """Deal with blocks that the connector could not load.

    Requests that rely on them compute again from the first bad block (policy "recompute"), or end
    with an error (policy "fail").

    Args:
        scheduler: The scheduler.
        block_ids: Ids of the bad blocks.

    Returns:
        Running requests whose tokens of this step are void.
    """
    waiting = [
        request
        for request in scheduler.skipped_waiting
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    ]
    bad_waiting = _first_bad_tokens(scheduler, waiting, block_ids)
    bad_running = _first_bad_tokens(scheduler, scheduler.running, block_ids)
    affected = [*bad_waiting, *bad_running]
    if not affected:
        return set()
    logger.warning(
        "%d KV blocks failed to load; %d requests are affected.", len(block_ids), len(affected)
    )
    void = {request.request_id for request in bad_running}
    # Neither a bad block nor what was computed from it may serve another request.
    tainted = set(block_ids)
    for request, first_bad in (*bad_waiting.items(), *bad_running.items()):
        tainted.update(_blocks_from(scheduler, request, first_bad))
    scheduler.kv_cache_manager.block_pool.evict_blocks(tainted)
    if not scheduler.recompute_kv_load_failures:
        ids = [request.request_id for request in affected]
        for request in bad_waiting:
            # The failure is the end of its transfer: nothing writes its blocks any more.
            scheduler.finished_recving_kv_req_ids.add(request.request_id)
        scheduler._refuse_all(ids, "KV blocks of the request failed to load from the connector.")
        return void
    for request, first_bad in (*bad_waiting.items(), *bad_running.items()):
        request.num_computed_tokens = first_bad
        request.spec_token_ids = []
    for request in bad_waiting:
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    return void


def _first_bad_tokens(
    scheduler: Scheduler, requests: Iterable[Request], block_ids: set[int]
) -> dict[Request, int]:
    """Return, for each request that uses a bad block, the tokens before the first of them."""
    bad: dict[Request, int] = {}
    block_sizes = _block_sizes(scheduler)
    for request in requests:
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for block_size, table in zip(block_sizes, tables, strict=True):
            index = next((i for i, block_id in enumerate(table) if block_id in block_ids), None)
            if index is not None:
                first = min(index * block_size, request.num_computed_tokens)
                bad[request] = min(first, bad.get(request, first))
    return bad


def _blocks_from(scheduler: Scheduler, request: Request, num_tokens: int) -> set[int]:
    """Return the blocks of a request that hold tokens from ``num_tokens`` on."""
    tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    return {
        block_id
        for block_size, table in zip(_block_sizes(scheduler), tables, strict=True)
        for block_id in table[num_tokens // block_size :]
    }


def _block_sizes(scheduler: Scheduler) -> list[int]:
    groups = scheduler.kv_cache_config.kv_cache_groups
    return [group.kv_cache_spec.block_size for group in groups]


def finish_loading(scheduler: Scheduler, request: Request) -> None:
    """Let a request whose KV arrived go on from it.

    Mutates:
        The request's computed tokens; blocks that arrived are published for other requests.
    """
    request_id = request.request_id
    scheduler.finished_recving_kv_req_ids.discard(request_id)
    if request_id in scheduler.failed_recving_kv_req_ids:
        scheduler.failed_recving_kv_req_ids.discard(request_id)
        if request.num_computed_tokens == 0:
            scheduler.kv_cache_manager.free(request)
            return
    num_loaded = request.num_computed_tokens
    scheduler.kv_cache_manager.cache_blocks(request, num_loaded)
    if num_loaded == request.num_tokens:
        # The last token is always computed: its logits give the next one.
        request.num_computed_tokens = num_loaded - 1
