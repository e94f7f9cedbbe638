"""Rows without a state: brought back into the pool, where windows are rebuilt above them.

    tokens     0 ........ G ........ 2G ........ 3G ...... n
    tiers      |  rows    |   rows    |   rows    |               no state up here
    loaded     |  rows    |   rows    |   rows    |               published like computed rows
    computed                     |<-- windows --->|<------>|      as after any lookup that finds
                                                                  rows and no checkpoint

The load is nobody's: the request that wants it waits, and looks the pool up again when it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.own_loads import allocate_load
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.lookups.ways import Restorable
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.pool.exports import PrefixBlocks

_PREFIX = "rows of "

OrderRestore = Callable[[str, Restorable, "PrefixBlocks"], None]


class RowLoads:
    """Brings rows back for requests that wait.

    Owns: the loads that run, by name, and the blocks they are written to.

    Args:
        manager: The pool's.
        unit: Tokens under one prefix hash.
    """

    def __init__(self, manager: KVCacheManager, unit: int) -> None:
        self._manager = manager
        self._unit = unit
        self._loading: dict[str, tuple[Request, int]] = {}

    def is_loading(self, name: str) -> bool:
        """Whether a load is one of these."""
        return name in self._loading

    def is_waited_for(self, request_id: str) -> bool:
        """Whether rows for a request are on their way."""
        return _PREFIX + request_id in self._loading

    def begin(self, request: Request, found: Restorable, order: OrderRestore) -> bool:
        """Begin to load rows for a request; False: the pool has no room for them."""
        position = found.position
        copy = Request(
            _PREFIX + request.request_id,
            list(request.all_token_ids[: position + 1]),
            SamplingParams(max_tokens=1),
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            block_hashes=request.block_hashes[: position // self._unit],
            tenant=request.tenant,
        )
        local = self._manager.look_up(copy)
        blocks = allocate_load(self._manager, copy, local, position)
        if blocks is None:
            return False
        self._loading[copy.request_id] = copy, position
        order(copy.request_id, found, blocks)
        return True

    def settle(self, name: str, *, has_failed: bool) -> None:
        """Take note that a load ended: its rows can be hit, or are nobody's."""
        if name not in self._loading:
            return
        copy, position = self._loading.pop(name)
        if not has_failed:
            self._manager.cache_rows(copy, position)
        self._manager.free(copy)
