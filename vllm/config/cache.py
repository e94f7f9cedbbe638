"""The KV cache: block size, memory, prefix caching."""

from dataclasses import dataclass
from typing import Any

from vllm.config.options import POSITIVE, Limit, check_options, option
from vllm.exceptions import ConfigError

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
HASH_ALGOS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_GROUP = "KV cache"


@dataclass
class CacheConfig:
    """The KV cache. Not frozen: the engine core sets ``num_gpu_blocks`` after profiling.

    Attributes:
        block_size: Tokens of a block; for DeepSeek-V4 the unit of prefix hits (32, 64 or 128).
        hash_block_size: Tokens under one prefix hash; None: derived from the groups.
        prefix_cache_retention_interval: How often window state is kept; None: unset.
        prefix_hash_seed: What every prompt's first hash is chained to, where several processes
            must agree; None: PYTHONHASHSEED or a random value. Who knows it can foretell hashes.
    """

    block_size: int = 16
    gpu_memory_utilization: float = option(
        0.92,
        "Share of the device's memory to use (GPU; on a CPU see --kv-cache-memory-bytes).",
        group=_GROUP,
        limit=Limit(lambda share: 0 < share <= 1, "must be above 0 and at most 1."),
    )
    cache_dtype: str = option(
        "auto",
        "Type of cached rows; auto: the model's, and float16 for GGUF files of coded weights on a "
        "CPU. float16 and bfloat16 take half of float32's memory; float16 is the more exact, and "
        "keeps values beyond 65,504 as that. int8: a little over a quarter, of keys and values, on "
        "a CPU. fp8: an Ascend A5's own pages.",
        group=_GROUP,
        flag="--kv-cache-dtype",
        choices=CACHE_DTYPES,
        more="See `docs/native.md` and `docs/ascend.md`.",
    )
    enable_prefix_caching: bool = True
    num_gpu_blocks: int | None = None
    num_gpu_blocks_override: int | None = option(
        None, "Exact number of blocks.", group=_GROUP, limit=POSITIVE, more="It beats memory."
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Exact size of the KV pool (2G).", group=_GROUP, limit=POSITIVE
    )
    prefix_caching_hash_algo: str = option(
        "sha256",
        group=_GROUP,
        choices=HASH_ALGOS,
        more="How prefixes are hashed; the `_cbor` ones can be recomputed by other programs.",
    )
    hash_block_size: int | None = None
    mamba_cache_mode: str = "none"
    prefix_cache_retention_interval: Any = None
    prefix_cache_pinned_share: float | None = option(
        None,
        "Share of the KV pool that windows pinned under VLLM_PIN_SWA_TOKENS=1 may hold, 0 to 1; "
        "default: VLLM_PIN_MAX_SHARE (0.25).",
        group=_GROUP,
        metavar="SHARE",
        limit=Limit(lambda share: 0 <= share <= 1, "must be between 0 and 1."),
    )
    prefix_hash_seed: bytes | None = None
    sliding_window: int | None = None
    is_attention_free: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size} must be positive.")
        check_options(self)
