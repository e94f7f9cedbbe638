"""Tiers that note what they restore, with orders of giving up that others may have."""

from collections.abc import Sequence
from typing import Any

from vllm.cachelab.sim.tier import SimTier
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey
from vllm.v1.request import Request


class _LruStore(ObjectStore):
    def pass_by(self, keys: Sequence[ObjectKey]) -> None:
        """Hear nothing of conversations that went on."""

    def use(self, keys: Sequence[ObjectKey], *, is_hit: bool) -> None:
        """Hear nothing of what was hit elsewhere: only reads are uses."""


class NotingTier(SimTier):
    """Remembers where each restore began and ended."""

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Note the tokens that are restored."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            end = request.num_computed_tokens + num_external_tokens
            self.restored[request.request_id] = num_external_tokens, end

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Make the tiers."""
        self.restored: dict[str, tuple[int, int]] = {}
        super().bind_kv_cache_manager(manager)


class LruTier(NotingTier):
    """Gives up what was used least recently, whatever became of its conversation."""

    store_class = _LruStore
