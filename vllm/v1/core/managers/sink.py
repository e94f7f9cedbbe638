"""Full attention with sink tokens: a few blocks that belong to the model, before every request."""

from __future__ import annotations

from vllm.exceptions import ConfigError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.managers.full_attention import FullAttentionManager
from vllm.v1.kv_cache_interface import SinkFullAttentionSpec


class SinkFullAttentionManager(FullAttentionManager):
    """Tables of a full-attention group whose sink entries live in blocks held for good.

    Owns: ``sink_blocks``.

    Raises:
        ConfigError: The spec's ``sink_len`` is not a positive multiple of its block size.
    """

    def __init__(
        self,
        kv_cache_spec: SinkFullAttentionSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        super().__init__(
            kv_cache_spec,
            block_pool,
            enable_caching,
            kv_cache_group_id,
            scheduler_block_size,
            dcp_world_size,
            pcp_world_size,
            max_admission_blocks_per_request,
        )
        sink_len = kv_cache_spec.sink_len
        if not sink_len or sink_len < 0 or sink_len % self.block_size:
            raise ConfigError(
                f"sink_len={sink_len} is not a positive multiple of the block size "
                f"{self.block_size}: choose a block size that divides it."
            )
        self.sink_blocks = block_pool.reserve_blocks(sink_len // self.block_size)
