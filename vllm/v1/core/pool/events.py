"""KV events: what became reusable and what is gone, for programs outside the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    AnyKVCacheEvent,
    BlockRemoved,
    BlockStored,
)
from vllm.utils.hashing import BlockHash
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash


class KVEventWriter:
    """Records events in the order in which things happen; nothing while it is off.

    Owns: ``queue``.
    """

    __slots__ = ("is_on", "queue")

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.queue: list[AnyKVCacheEvent] = []

    def stored(
        self,
        block_hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        block_size: int,
        group_id: int,
        *,
        lora: Any = None,
        extra_keys: list[tuple[Any, ...] | None] | None = None,
        session_id: str | None = None,
    ) -> None:
        """Record that prefixes became reusable.

        Args:
            block_hashes: Their hashes, ``block_size`` tokens apart.
            parent: Hash of the prefix before the first; None at a prompt's start, and for
                checkpoints beside dense groups.
            token_ids: The tokens between them; none for checkpoints beside dense groups, whose
                events describe the prefix.
            block_size: Tokens between two hashes; 0 where there are no tokens.
            group_id: The group.
            lora: The adapter the tokens were computed with.
            extra_keys: What the hashes hold besides tokens, one entry per hash.
            session_id: Of the request.
        """
        if not self.is_on or not block_hashes:
            return
        self.queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(h) for h in block_hashes],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=list(token_ids),
                block_size=block_size,
                lora_id=None if lora is None else lora.lora_int_id,
                medium=MEDIUM_GPU,
                lora_name=None if lora is None else lora.lora_name,
                extra_keys=extra_keys,
                group_idx=group_id,
                session_id=session_id,
            )
        )

    def removed(self, block_hash: BlockHash, group_id: int) -> None:
        """Record that a prefix's entry in a group is gone."""
        if self.is_on:
            converted = maybe_convert_block_hash(block_hash)
            self.queue.append(BlockRemoved([converted], medium=MEDIUM_GPU, group_idx=group_id))

    def cleared(self) -> None:
        """Record that everything is gone."""
        if self.is_on:
            self.queue.append(AllBlocksCleared())

    def take(self) -> list[AnyKVCacheEvent]:
        """Drain the events."""
        events = self.queue.copy()
        self.queue.clear()
        return events
