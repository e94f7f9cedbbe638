"""The KV cache: block size, memory, prefix caching."""

from dataclasses import dataclass
from typing import Any

from vllm.exceptions import ConfigError

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@dataclass
class CacheConfig:
    """The KV cache. Not frozen: the engine core sets ``num_gpu_blocks`` after profiling.

    Attributes:
        block_size: Tokens of a block; for DeepSeek-V4 the unit of prefix hits (32, 64 or 128).
        gpu_memory_utilization: Share of the device's memory the process may take.
        kv_cache_memory_bytes: Exact size of the pool in bytes; None: derived from free memory.
        num_gpu_blocks_override: Exact number of blocks; wins over memory.
        cache_dtype: Type of cached rows; "auto": the model's.
        hash_block_size: Tokens under one prefix hash; None: derived from the groups.
        prefix_cache_retention_interval: How often window state is kept; None: unset.
        prefix_cache_pinned_share: Share of the pool that pinned windows may hold, where
            VLLM_PIN_SWA_TOKENS is on; None: as VLLM_PIN_MAX_SHARE says.
        prefix_hash_seed: What every prompt's first hash is chained to, where several processes
            must agree; None: PYTHONHASHSEED or a random value. Who knows it can foretell hashes.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    num_gpu_blocks: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    prefix_caching_hash_algo: str = "sha256"
    hash_block_size: int | None = None
    mamba_cache_mode: str = "none"
    prefix_cache_retention_interval: Any = None
    prefix_cache_pinned_share: float | None = None
    prefix_hash_seed: bytes | None = None
    sliding_window: int | None = None
    is_attention_free: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size} must be positive.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at "
                "most 1."
            )
        share = self.prefix_cache_pinned_share
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"prefix_cache_pinned_share={share} must be between 0 and 1.")
        if self.prefix_caching_hash_algo not in HASH_ALGOS:
            raise ConfigError(
                f"prefix_caching_hash_algo={self.prefix_caching_hash_algo!r} is unknown: use one "
                f"of {', '.join(HASH_ALGOS)}."
            )
        for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be positive.")
