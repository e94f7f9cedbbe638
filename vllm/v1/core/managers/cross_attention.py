"""Cross attention: entries of the encoder's output, written once, never shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm.v1.core.managers.base import SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Tables whose length is that of the encoder's output."""

    counts_encoder_tokens: ClassVar[bool] = True
    drops_skipped_blocks: ClassVar[bool] = False

    def adopt_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], num_total_tokens: int
    ) -> None:
        """Adopt nothing: encoder entries depend on more than the request's tokens."""
        assert not new_computed_blocks

    def allocate_external_blocks(self, request_id: str, num_total_tokens: int) -> None:
        """Take nothing: a connector loads the decoder's tokens only."""

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Refuse.

        Raises:
            ValueError: Always.
        """
        raise ValueError("Cross-attention blocks cannot be cached: turn prefix caching off.")

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Refuse.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("Cross-attention blocks are never cached.")
