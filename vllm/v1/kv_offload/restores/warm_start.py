"""Prefixes brought back before anybody asks: the last life's most used ones, and the named ones."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.own_loads import OwnLoads, stand_in
from vllm.distributed.kv_transfer.used_prefixes import WarmList, WarmPrefix
from vllm.logger import init_logger
from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.lookups.ways import Restorable, Tiers, find_restorable
from vllm.v1.kv_offload.restores.warm_file import dump_prefixes, load_prefixes
from vllm.v1.kv_offload.store.opening import IndexUnreadError
from vllm.v1.kv_offload.tier_view import WarmStart
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.pool.exports import PrefixBlocks

logger = init_logger(__name__)

# The list is written down so often at most.
_WRITE_S = 5.0
# They may fill this share of the pool.
_MAX_SHARE = 0.5

OrderRestore = Callable[[str, Restorable, "PrefixBlocks"], None]


class Warming:
    """Brings prefixes back into a pool that nobody uses yet, one at a time, and follows use.

    Each is loaded like the prefix of a request, and is one more cached prefix when it is whole.

    Owns: the list of what to bring back, the load that runs, what the next start shall bring back.

    Args:
        manager: The pool's.
        layout: What objects are made of.
        loads: The loads that are nobody's.
        most: Prefixes without a name to bring back; 0: none, named ones neither.
    """

    def __init__(
        self, manager: KVCacheManager, layout: ObjectLayout, loads: OwnLoads, most: int
    ) -> None:
        self._manager = manager
        self._loads = loads
        self._layout = layout
        self._most = most
        self._list = WarmList()
        self._waiting: deque[WarmPrefix] = deque()
        # Which prefix comes, and what its load is called.
        self._loading: tuple[str, WarmPrefix] | None = None
        self._num_loaded = self._num_tokens = 0
        self._written_at = -math.inf
        self._clock: Callable[[], float] = time.monotonic
        self._unix_clock: Callable[[], float] = time.time

    def use_clock(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        """Let time pass by clocks of the caller's, in seconds."""
        self._clock, self._unix_clock = clock, unix_clock

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way, or waits for its turn."""
        return self._loading is not None or bool(self._waiting)

    def open(self, data: bytes | None) -> None:
        """Take what the last life wrote down."""
        if not self._most or data is None:
            return
        known = load_prefixes(data, self._unix_clock())
        self._waiting.extend(prefix for prefix in known if prefix.name is not None)
        unnamed = [prefix for prefix in known if prefix.name is None]
        self._waiting.extend(unnamed[: self._most])

    # ---- bringing back -----------------------------------------------------------------------

    def begin(self, tiers: Tiers, order: OrderRestore) -> None:
        """Begin the next load, if none runs; part of a step's scheduling."""
        while self._waiting and self._loading is None:
            if self._manager.block_pool.get_usage() > _MAX_SHARE or self._is_full():
                self._waiting.clear()
                break
            prefix = self._waiting.popleft()
            try:
                self._begin(prefix, tiers, order)
            except IndexUnreadError:
                # The disk's thread reads that part next.
                self._waiting.appendleft(prefix)
                return
            if self._loading is None and not self._waiting:
                self._tell()

    def _is_full(self) -> bool:
        pool = self._manager.block_pool
        return self._num_loaded > 0 and self._num_blocks > pool.num_gpu_blocks * _MAX_SHARE

    @property
    def _num_blocks(self) -> int:
        """Blocks that what was brought back takes, at most."""
        return sum(
            self._num_tokens // group.block_size + 1
            for group in self._layout.groups
            if not group.is_window
        )

    def _begin(self, prefix: WarmPrefix, tiers: Tiers, order: OrderRestore) -> None:
        unit = self._layout.unit
        num_tokens = len(prefix.hashes) * unit
        ttls = {} if prefix.name is None else {num_tokens: prefix.seconds}
        name = prefix.name or f"warm-{self._num_loaded}"
        request = stand_in(name, prefix.hashes, unit, ttls)
        local = self._manager.look_up(request)
        found = find_restorable(tiers, self._layout, prefix.hashes, local.num_tokens, num_tokens)
        if found is None:
            return
        blocks = self._loads.begin(request, local, found.position, found.next_token)
        if blocks is None:
            self._waiting.clear()
            return
        self._loading = name, prefix
        order(name, found, blocks)

    def note_loaded(self, name: str, num_tokens: int) -> None:
        """Take note that a load ended that was nobody's, and of how many tokens came."""
        if self._loading is None or self._loading[0] != name:
            return
        prefix, self._loading = self._loading[1], None
        if num_tokens:
            self._num_loaded += 1
            self._num_tokens += num_tokens
            if prefix.name is not None:
                self._list.note_name(prefix.name, prefix.hashes)
            else:
                self._list.note_use(prefix.hashes)
        if not self._waiting:
            self._tell()

    def _tell(self) -> None:
        if self._num_loaded:
            logger.info(
                "Prefix cache on disk: %d prefixes of %d tokens are back before the first request.",
                self._num_loaded,
                self._num_tokens,
            )

    def view(self) -> WarmStart:
        """Return how far it is, once it is known what is there."""
        num_left = len(self._waiting) + (self._loading is not None)
        state = "off" if not self._most else "loading" if num_left else "done"
        return WarmStart(state, self._num_loaded, self._num_tokens, num_left)

    # ---- following use -----------------------------------------------------------------------

    def note_end(self, request: Request) -> None:
        """Take note of a request that ended."""
        if not self._most:
            return
        num_units = self._list.note_request(request, self._layout.unit)
        for offset in request.cache_ttls:
            units = offset // self._layout.unit
            if units <= num_units:
                self._list.note_name(request.request_id, request.block_hashes[:units])

    def forget(self) -> None:
        """Forget what was used: the tiers are emptied."""
        self._waiting.clear()
        self._list.forget()
        self._list.has_news = True

    def take_news(self, *, is_last: bool = False) -> bytes | None:
        """Return what to write down now; None: nothing."""
        now = self._clock()
        if not self._most or not (self._list.has_news or self._list.names):
            return None
        if self.is_busy or (now < self._written_at + _WRITE_S and not is_last):
            return None
        held = {
            prefix.id: math.inf if prefix.expires_in is None else prefix.expires_in
            for prefix in self._manager.coordinator.held_prefixes()
            if prefix.is_pinned
        }
        # What was let go must not be kept again after a restart.
        if not self._list.has_news and self._list.names <= held.keys():
            return None
        self._written_at = now
        self._list.has_news = False
        return dump_prefixes(self._list.choose(held, self._most), self._unix_clock())
