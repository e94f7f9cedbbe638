"""Much used prefixes that neighbours hold, pulled into a cache before anybody asks for them.

offers of neighbours --(one at a time, within the budget)--> loading --(worker reports)--> cached
                     `--(budget spent, time over, no room, or here already)--> given back
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from vllm.distributed.kv_transfer.handover.orders import HandoverOrders, LoadOrder
from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.own_loads import OwnLoads, stand_in
from vllm.logger import init_logger
from vllm.v1.messages import PopularPrefix
from vllm.v1.metrics.stats import PullStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = init_logger(__name__)

# Neighbours serve meanwhile: after a load nothing is pulled for this many times as long.
_PAUSE = 1.0


@dataclass(slots=True)
class _Loading:
    name: str
    prefix: PopularPrefix
    num_blocks: int
    began: float


class PopularLoads:
    """Pulls prefixes one after another, into blocks that hold nothing anybody asked to keep.

    Owns: what was offered, the load that runs, the budget that is left.

    Args:
        manager: Gives the blocks.
        unit: Tokens under one hash.
        block_bytes: Of a block id.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        unit: int,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._loads = OwnLoads(manager)
        self._unit = unit
        self._block_bytes = block_bytes
        self._clock = clock
        self._waiting: deque[PopularPrefix] = deque()
        self._loading: _Loading | None = None
        self._began = self._deadline = self._next_at = 0.0
        self._bytes_left = 0
        self._is_pulling = False
        self._pulled = PullStats()
        # Who waits for the end of what was asked.
        self._told: list[Callable[[PullStats], None]] = []
        # What statistics have not got yet.
        self._untold: PullStats | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way, or waits for its turn."""
        return self._is_pulling

    def is_loading(self, request_id: str) -> bool:
        """Whether a load is one of these."""
        return self._loading is not None and self._loading.name == request_id

    def add(
        self,
        prefixes: Sequence[PopularPrefix],
        max_bytes: int,
        seconds: float,
        tell: Callable[[PullStats], None],
    ) -> None:
        """Begin to pull; what was asked before goes on under the new budget.

        Args:
            prefixes: The most wanted first.
            max_bytes: Most to pull.
            seconds: For how long.
            tell: Gets what came of it, once it has ended.
        """
        now = self._clock()
        if not self._is_pulling:
            self._began, self._pulled = now, PullStats()
        self._is_pulling = True
        self._told.append(tell)
        self._waiting.extend(prefixes)
        self._bytes_left = max_bytes
        self._deadline, self._next_at = now + seconds, now

    def begin(self, orders: HandoverOrders) -> None:
        """Begin the next load, if none runs; part of a step's scheduling."""
        if not self._is_pulling or self._loading is not None:
            return
        now = self._clock()
        while self._waiting and self._loading is None:
            if now >= self._deadline or self._bytes_left <= 0:
                orders.returned += map(_remote, self._waiting)
                self._waiting.clear()
            elif now < self._next_at:
                return
            else:
                self._begin(self._waiting.popleft(), orders, now)
        if self._loading is None:
            self._report(now)

    def _begin(self, prefix: PopularPrefix, orders: HandoverOrders, now: float) -> None:
        manager, pool = self._manager, self._manager.block_pool
        name = f"popular-{uuid4().hex}"
        request = stand_in(name, prefix.hashes, self._unit)
        local = manager.look_up(request)
        # Nothing that is cached goes for it, and nobody who runs is held up.
        room = pool.num_scratch_blocks + pool.num_spare_blocks - pool.num_kept
        blocks = None
        if local.num_tokens < prefix.num_tokens and prefix.num_blocks < room:
            tokens, following = prefix.num_tokens, prefix.next_token
            blocks = self._loads.begin(request, local, tokens, following)
        if blocks is None:
            orders.returned.append(_remote(prefix))
            return
        here = {block_id for table in local.blocks.get_block_ids() for block_id in table}
        ids = {block_id for table in blocks.block_ids for block_id in table}
        num_blocks = len(ids - here - {0})
        self._bytes_left -= num_blocks * self._block_bytes
        self._loading = _Loading(name, prefix, num_blocks, now)
        orders.loads.append(LoadOrder(name, _remote(prefix), blocks))

    def settle(self, request_id: str, orders: HandoverOrders, *, has_failed: bool) -> bool:
        """Take note that a load ended; False: it is not one of these."""
        if not self.is_loading(request_id):
            return False
        loading, self._loading = self._loading, None
        assert loading is not None
        prefix, pulled = loading.prefix, self._pulled
        self._loads.settle(request_id, has_failed=has_failed)
        if has_failed:
            pulled.num_failed += 1
        else:
            pulled.num_prefixes += 1
            pulled.num_tokens += prefix.num_tokens
            pulled.num_bytes += loading.num_blocks * self._block_bytes
        orders.returned.append(_remote(prefix))
        now = self._clock()
        self._next_at = now + _PAUSE * (now - loading.began)
        return True

    def _report(self, now: float) -> None:
        self._is_pulling = False
        self._pulled.seconds = now - self._began
        self._untold = report = self._pulled
        told, self._told = self._told, []
        for tell in told:
            tell(report)
            # Those that came while one ran went on with it.
            report = PullStats()
        logger.info(
            "Pulled %d prefixes of %d tokens (%d bytes) of other caches in %.1f s; %d failed.",
            self._pulled.num_prefixes,
            self._pulled.num_tokens,
            self._pulled.num_bytes,
            self._pulled.seconds,
            self._pulled.num_failed,
        )

    def take_stats(self) -> PullStats | None:
        """Return what the last pull came to, once."""
        stats, self._untold = self._untold, None
        return stats


def _remote(prefix: PopularPrefix) -> RemotePrefix:
    return RemotePrefix(
        prefix.engine_id,
        prefix.instance,
        prefix.host,
        prefix.port,
        prefix.lease,
        prefix.num_tokens,
        "",
        prefix.next_token,
    )
