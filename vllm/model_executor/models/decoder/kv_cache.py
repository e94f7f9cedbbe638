"""A decoder's cache geometry (torch-free): one cache an attention layer, named after it.

A layer that attends to another's keys and values has none.

A row holds one token's keys of all heads, then its values: 2 * num_kv_heads * head_dim values, in
bytes with a scale for each head; or one latent, of which keys and values of all heads are products:
head_dim values.
Blocks are ``--block-size`` tokens in full-attention and window layers alike. The states of all
recurrent layers are one cache, in pages as wide as a block of all attention layers.

Latents that an indexer chooses from, by pools of r tokens, have two caches more, beside that of
their rows of L values:

    cache             tokens of a block    rows     one row holds
    .indexer          r * k * block size   / r      a pool's key [I]; k = max(1, L // I), so that a
                                                    block is as wide as one of latents
    .indexer_state    block size           all      an open pool's token: key and weights [2 * I]

A pool that is complete needs no state: where r divides the block size, no prefix does. Pools of one
token are never open, and have no such cache; their keys lie in blocks of as many tokens as latents'
(k = 1), with which they share a block table. A layer that attends to what another one's indexer
chooses has neither.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.config import DecoderConfig, LatentShape
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateShape,
)
from vllm.v1.kv_cache_specs.base import PackingKey
from vllm.v1.kv_cache_specs.latent import check_latent_mode

if TYPE_CHECKING:
    import torch

SUPPORTED_BLOCK_SIZES = (16, 32, 64, 128)
"""The values of ``--block-size`` that these models are tested with."""


STATES = "model.recurrent_states"
"""Name of the cache of all recurrent layers' states."""


def cache_name(layer: int) -> str:
    """Returns the name of a layer's cache."""
    return f"model.layers.{layer}.self_attn"


def drafter_cache_name(config: DecoderConfig) -> str:
    """Returns the name of the cache of the block that drafts: a layer above the last one."""
    return cache_name(len(config.layers))


def pool_keys_name(layer: int) -> str:
    """Returns the name of the cache of a layer's pool keys."""
    return f"{cache_name(layer)}.indexer"


def pool_state_name(layer: int) -> str:
    """Returns the name of the cache of a layer's open pools."""
    return f"{cache_name(layer)}.indexer_state"


def drafter_cache_names(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the names of the caches of the block that drafts, that of its rows first."""
    layer = len(config.layers)
    rows = drafter_cache_name(config)
    assert config.drafter is not None, "a block drafts"
    latent = config.shape_of(config.drafter).latent
    if latent is None or latent.indexer is None:
        return (rows,)
    names = (rows, pool_keys_name(layer))
    return names if latent.indexer.pool_size == 1 else (*names, pool_state_name(layer))


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
        state_dtype: Type of recurrent states and of open pools.

    Raises:
        ConfigError: The block size is not supported, or the type of keys and values.
    """
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigError(
            f"--block-size {block_size} is not supported; use one of "
            f"{', '.join(map(str, SUPPORTED_BLOCK_SIZES))}"
        )
    specs: dict[str, KVCacheSpec] = {}
    drafters = () if config.drafter is None else (config.drafter,)
    for index, layer in enumerate((*config.layers, *drafters)):
        if layer.kv_owner is not None or layer.recurrence is not None:
            continue
        shape = config.shape_of(layer)
        if shape.latent is not None:
            check_latent_mode(KVQuantMode.of_dtype(cache_dtype))
        full = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_dim,
            # Values are made of the same row as keys where that is a latent.
            head_size_v=shape.head_dim if shape.latent is None else 0,
            dtype=cache_dtype,
            kv_quant_mode=KVQuantMode.of_dtype(cache_dtype),
        )
        specs[cache_name(index)] = _with_window(full, layer.window) if layer.window else full
        if shape.latent is not None and layer.index_owner is None:
            specs |= _pool_specs(shape.latent, index, block_size, cache_dtype, state_dtype)
    if config.recurrences:
        specs[STATES] = _state_spec(config, specs, block_size, state_dtype)
    return specs


def _pool_specs(
    latent: LatentShape,
    layer: int,
    block_size: int,
    cache_dtype: "torch.dtype",
    state_dtype: "torch.dtype",
) -> dict[str, KVCacheSpec]:
    """Builds the specs of a layer's pools: keys of complete ones, rows of open ones."""
    indexer = latent.indexer
    if indexer is None:
        return {}
    size, width = indexer.pool_size, indexer.head_dim
    blocks_per_block = 1 if size == 1 else max(1, latent.row_width // width)
    keys = MLAAttentionSpec(
        block_size=block_size * size * blocks_per_block,
        num_kv_heads=1,
        head_size=width,
        dtype=cache_dtype,
        compress_ratio=size,
        is_indexer=True,
    )
    if size == 1:
        return {pool_keys_name(layer): keys}
    state = CompressorStateSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=2 * width,
        dtype=state_dtype,
        sliding_window=size,
        state_ratio=size,
        state_overlap=False,
        is_indexer=True,
    )
    return {pool_keys_name(layer): keys, pool_state_name(layer): state}


def state_shape(config: DecoderConfig) -> StateShape:
    """Returns what a request's recurrent states are made of."""
    plan = config.recurrences[0]
    num_heads, key_dim, value_dim = plan.state_heads
    return StateShape(
        num_layers=len(config.recurrences),
        num_heads=num_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        num_channels=plan.num_channels,
        num_columns=plan.conv_width - 1,
    )


def _state_spec(
    config: DecoderConfig,
    attention: Mapping[str, KVCacheSpec],
    block_size: int,
    dtype: "torch.dtype",
) -> RecurrentStateSpec:
    """Cuts a state into pages as wide as a block of all attention layers: no block grows by it."""
    shape = state_shape(config)
    widths: dict[PackingKey, int] = defaultdict(int)
    for spec in attention.values():
        if spec.keeps_every_token:
            widths[spec.packing_key()] += spec.page_size_bytes
    width_bytes = max(widths.values())
    smallest = max(shape.head_values, shape.num_columns)
    page_values = max(width_bytes // dtype.itemsize, smallest)
    return RecurrentStateSpec(
        block_size=block_size, shape=shape, page_values=page_values, dtype=dtype
    )


def _with_window(full: FullAttentionSpec, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=full.block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=full.dtype,
        kv_quant_mode=full.kv_quant_mode,
        sliding_window=window,
    )
