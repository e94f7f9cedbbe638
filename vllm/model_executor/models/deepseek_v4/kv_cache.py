"""DeepSeek-V4's cache geometry: the one table of block sizes (torch-free).

For ``--block-size`` bs (tokens of one prefix unit), in tokens per block:

    cache             layers            block            rows      one row holds
    .window           all, and MTP      bs               bs        roped kv         [head_dim]
    .mla              csa (rate r)      r * bs           bs        roped entry      [head_dim]
    .mla              hca (rate r)      r * bs           bs        roped entry      [head_dim]
    .indexer          csa               r * bs           bs        roped index key  [index_head_dim]
    .state            csa               gcd(bs/16, 2r)   = block   c and s, each 2 * head_dim
    .indexer_state    csa               gcd(bs/16, 2r)   = block   c and s, each 2 * index_head_dim
    .state            hca               gcd(bs/4, r)     = block   c and s, each head_dim

A state block divides its compressor's window (2r rows with overlap, else r), so that a window
never straddles blocks unevenly; at rates 4 and 128 the two rules give bs/16 and bs/4.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.config import LatentConfig, LayerPlan
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.kv_cache_specs.latent import check_latent_mode

if TYPE_CHECKING:
    import torch

SUPPORTED_BLOCK_SIZES = (32, 64, 128)
"""The values of ``--block-size`` that the table above is defined for, the default first."""


def entry_block_size(ratio: int, block_size: int) -> int:
    """Returns the tokens of a block of entries or index keys, one per ``ratio`` tokens."""
    return ratio * block_size


def state_block_size(ratio: int, block_size: int, *, has_overlap: bool) -> int:
    """Returns the tokens of a block of compressor state."""
    return gcd(block_size // (16 if has_overlap else 4), state_window(ratio, has_overlap))


def state_window(ratio: int, has_overlap: bool) -> int:
    """Returns the rows that a compressor of a rate reads."""
    return 2 * ratio if has_overlap else ratio


@dataclass(frozen=True, slots=True)
class LayerCacheNames:
    """Names of one layer's caches; a window-only layer uses just the first."""

    window: str
    entries: str
    state: str
    indexer: str
    indexer_state: str

    @classmethod
    def of_block(cls, block: str) -> "LayerCacheNames":
        """Returns the names of a block such as "layers.3" or "mtp.0"."""
        return cls(
            window=f"{block}.attn.window",
            entries=f"{block}.attn.mla",
            state=f"{block}.attn.state",
            indexer=f"{block}.attn.indexer",
            indexer_state=f"{block}.attn.indexer_state",
        )


MTP_WINDOW = LayerCacheNames.of_block("mtp.0").window
"""The one cache of the block that drafts."""


def check_block_size(config: LatentConfig, block_size: int) -> None:
    """Refuses a ``--block-size`` that the table is not defined for.

    Raises:
        ConfigError: The size is not 32, 64 or 128, or it and a compress rate are not multiples
            of one another.
    """
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigError(
            f"--block-size {block_size} does not fit DeepSeek-V4's caches; use 32, 64 or 128"
        )
    for plan in config.layers:
        ratio = plan.ratio
        if ratio and ratio % block_size and block_size % ratio:
            raise ConfigError(
                f"--block-size {block_size} and the {plan.kind} compress rate {ratio} are not "
                "multiples of one another; use a --block-size of 32, 64 or 128 that is, if any"
            )


def deepseek_v4_kv_cache_specs(
    config: LatentConfig,
    block_size: int,
    cache_dtype: "torch.dtype",
    state_dtype: "torch.dtype",
) -> dict[str, KVCacheSpec]:
    """Builds the cache spec of every layer.

    Args:
        config: The architecture.
        block_size: ``--block-size``: tokens of one prefix unit.
        cache_dtype: Type of window rows, entries and index keys.
        state_dtype: Type of compressor rows; fp32 in every known implementation.

    Returns:
        Specs by cache name, in layer order, the MTP block's last.

    Raises:
        ConfigError: See ``check_block_size`` and ``check_latent_mode``.
    """
    check_block_size(config, block_size)
    check_latent_mode(KVQuantMode.of_dtype(cache_dtype))
    specs: dict[str, KVCacheSpec] = {}
    for layer, plan in enumerate(config.layers):
        names = LayerCacheNames.of_block(f"layers.{layer}")
        specs[names.window] = _window_spec(config, block_size, cache_dtype)
        if plan.kind == "window":
            continue
        width = config.head_dim
        specs[names.entries] = _entry_spec(plan, width, block_size, cache_dtype)
        specs[names.state] = _state_spec(plan, width, block_size, state_dtype)
        if plan.kind == "csa":
            width = config.index_head_dim
            keys = _entry_spec(plan, width, block_size, cache_dtype)
            states = _state_spec(plan, width, block_size, state_dtype)
            specs[names.indexer] = replace(keys, is_indexer=True)
            specs[names.indexer_state] = replace(states, is_indexer=True)
    for layer in range(config.num_nextn_predict_layers):
        names = LayerCacheNames.of_block(f"mtp.{layer}")
        rows = _window_spec(config, block_size, cache_dtype)
        specs[names.window] = replace(rows, is_drafter=True)
    return specs


def _window_spec(
    config: LatentConfig, block_size: int, dtype: "torch.dtype"
) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=config.head_dim,
        dtype=dtype,
        sliding_window=config.sliding_window,
    )


def _entry_spec(
    plan: LayerPlan, width: int, block_size: int, dtype: "torch.dtype"
) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=entry_block_size(plan.ratio, block_size),
        num_kv_heads=1,
        head_size=width,
        dtype=dtype,
        compress_ratio=plan.ratio,
    )


def _state_spec(
    plan: LayerPlan, width: int, block_size: int, dtype: "torch.dtype"
) -> CompressorStateSpec:
    has_overlap = plan.kind == "csa"
    return CompressorStateSpec(
        block_size=state_block_size(plan.ratio, block_size, has_overlap=has_overlap),
        num_kv_heads=1,
        # c and s rows side by side; with overlap each token has two of both.
        head_size=(4 if has_overlap else 2) * width,
        dtype=dtype,
        sliding_window=state_window(plan.ratio, has_overlap),
        state_ratio=plan.ratio,
        state_overlap=has_overlap,
    )
