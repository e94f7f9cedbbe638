"""A decoder's cache geometry (torch-free): one cache a layer, named after its attention.

A layer that attends to another's keys and values has none.

A row holds one token's keys of all heads, then its values: 2 * num_kv_heads * head_dim values.
Blocks are ``--block-size`` tokens in full-attention and window layers alike.
"""

from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.config import DecoderConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

if TYPE_CHECKING:
    import torch

SUPPORTED_BLOCK_SIZES = (16, 32, 64, 128)
"""The values of ``--block-size`` that these models are tested with."""


def cache_name(layer: int) -> str:
    """Returns the name of a layer's cache."""
    return f"model.layers.{layer}.self_attn"


def decoder_kv_cache_specs(
    config: DecoderConfig,
    block_size: int,
    cache_dtype: "torch.dtype",
    state_dtype: "torch.dtype",
) -> dict[str, KVCacheSpec]:
    """Builds the cache spec of every layer.

    Args:
        config: The architecture.
        block_size: ``--block-size``: tokens of one prefix unit.
        cache_dtype: Type of keys and values.
        state_dtype: Not used: there is no recurrent state.

    Raises:
        ConfigError: The block size is not supported.
    """
    del state_dtype
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigError(
            f"--block-size {block_size} is not supported; use one of "
            f"{', '.join(map(str, SUPPORTED_BLOCK_SIZES))}"
        )
    specs: dict[str, KVCacheSpec] = {}
    for index, layer in enumerate(config.layers):
        if layer.kv_owner is not None:
            continue
        shape = config.shape_of(layer)
        full = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_dim,
            dtype=cache_dtype,
        )
        specs[cache_name(index)] = _with_window(full, layer.window) if layer.window else full
    return specs


def _with_window(full: FullAttentionSpec, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=full.block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=full.dtype,
        sliding_window=window,
    )
