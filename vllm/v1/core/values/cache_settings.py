"""What a KV cache is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from vllm import envs
from vllm.v1.core.retention.cache_shares import CacheShares
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.kv_cache_interface import KVCacheConfig

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector


class StaleRow(StrEnum):
    """What becomes of a drafter's row that another next token made (``prefix.drafter_rows``).

    REBUILD makes it anew in a private copy of its block, from the boundary's residual streams,
    which the worker keeps. KEEP leaves it. DROP resumes at a lower boundary whose row fits.
    """

    REBUILD = "rebuild"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Groups, sizes and switches of a KV cache: built once, and handed on.

    Attributes:
        kv_cache_config: Groups and number of blocks.
        max_model_len: Longest request in tokens.
        max_num_batched_tokens: Tokens of a step.
        scheduler_block_size: Tokens on whose multiples a hit ends, with hits at whole blocks.
        hash_block_size: Tokens under one hash of ``Request.block_hashes``.
        enable_caching: Whether prefixes are kept and looked up.
        use_eagle: Whether a drafter reads the cache (EAGLE, MTP).
        enable_kv_cache_events: Whether stored and removed prefixes are recorded.
        dcp_world_size: Ranks of decode context parallelism.
        pcp_world_size: Ranks of prefill context parallelism.
        metrics_collector: Samples block lifetimes, if given.
        num_lookahead_tokens: Slots a drafter may write beyond a step's tokens.
        stale_row: What becomes of a drafter's row that another next token made.
        policy: Which checkpoints are kept; None: as the config or the environment says.
        pinning: What long steps pin; None: with a policy nothing, else as the environment says.
        shares: Tenants' shares of the cache; None: it is everybody's.
        allows_lazy: Whether layers may leave out rows that no output depends on: nobody but this
            cache reads what steps store.
        retention: What the config says about window state, else what the variable says when the
            settings are built; None: neither says anything.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    max_num_batched_tokens: int
    scheduler_block_size: int
    hash_block_size: int
    enable_caching: bool = True
    use_eagle: bool = False
    enable_kv_cache_events: bool = False
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    metrics_collector: KVCacheMetricsCollector | None = None
    num_lookahead_tokens: int = 0
    stale_row: StaleRow = StaleRow.REBUILD
    policy: RetentionPolicy | None = None
    pinning: PinSettings | None = None
    shares: CacheShares | None = None
    allows_lazy: bool = False
    retention: int | str | None = field(init=False)

    def __post_init__(self) -> None:
        given = self.kv_cache_config.prefix_cache_retention_interval
        object.__setattr__(self, "retention", envs.retention_or_default(given))

    @property
    def num_context_ranks(self) -> int:
        """Ranks among which a block's tokens are spread."""
        return self.dcp_world_size * self.pcp_world_size
