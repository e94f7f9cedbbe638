"""DeepSeek-V4.1's cache geometry (torch-free).

For ``--block-size`` bs (tokens of one prefix unit), in tokens per block:

    cache             layers            block       rows      one row holds
    .window           all               bs          bs        roped kv         [head_dim]
    .mla              kv sources (r)    4 bs        4 bs / r  roped entry      [head_dim]
    .indexer          kv sources (r)    4 bs        4 bs / r  roped index key  [index_head_dim]
    .state            kv sources, r > 1 r           r         c and g, each head_dim

Dense blocks of all ratios cover the same tokens, so all dense caches are one group. Windows are
split before the last layer that makes entries: from there on they serve a prompt's end alone, but
for the entries.
A ratio divides the unit, so at the end of a unit no window of a compressor is open, and no state
has to be kept there.
"""

from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.kv_cache import (
    SUPPORTED_BLOCK_SIZES,
    LayerCacheNames,
)
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
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

_UNITS_OF_DENSE_BLOCK = 4


def check_block_size(config: DeepseekV41Config, block_size: int) -> None:
    """Refuses a ``--block-size`` that the table is not defined for.

    Raises:
        ConfigError: The size is not 32, 64 or 128, or a compress ratio does not divide it.
    """
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigError(
            f"--block-size {block_size} does not fit DeepSeek-V4.1's caches; use 32, 64 or 128"
        )
    for plan in config.layers:
        if plan.ratio and block_size % plan.ratio:
            raise ConfigError(
                f"--block-size {block_size} is no multiple of the compress ratio {plan.ratio}; use "
                "a --block-size of 32, 64 or 128 that is, if any"
            )


def deepseek_v41_kv_cache_specs(
    config: DeepseekV41Config,
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
        Specs by cache name, in layer order.

    Raises:
        ConfigError: See ``check_block_size`` and ``check_latent_mode``.
    """
    check_block_size(config, block_size)
    check_latent_mode(KVQuantMode.of_dtype(cache_dtype))
    specs: dict[str, KVCacheSpec] = {}
    reach = (len(config.layers) - config.cut) * (config.sliding_window - 1)
    for layer, plan in enumerate(config.layers):
        names = LayerCacheNames.of_block(f"layers.{layer}")
        # Without a layer below there are no rows that a checkpoint inside a prompt could hold.
        is_lazy = 0 < config.cut <= layer
        specs[names.window] = SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=config.head_dim,
            dtype=cache_dtype,
            sliding_window=config.sliding_window,
            section=int(is_lazy),
            lazy_reach=reach if is_lazy else 0,
        )
        if plan.source != layer:
            continue
        for name, width in (
            (names.entries, config.head_dim),
            (names.indexer, config.index_head_dim),
        ):
            specs[name] = MLAAttentionSpec(
                block_size=_UNITS_OF_DENSE_BLOCK * block_size,
                num_kv_heads=1,
                head_size=width,
                dtype=cache_dtype,
                compress_ratio=plan.ratio,
                mixes_ratios=True,
                is_indexer=name == names.indexer,
            )
        if plan.ratio > 1:
            specs[names.state] = CompressorStateSpec(
                block_size=plan.ratio,
                num_kv_heads=1,
                head_size=2 * config.head_dim,
                dtype=state_dtype,
                sliding_window=plan.ratio,
                state_ratio=plan.ratio,
                state_overlap=False,
            )
    return specs
