"""DeepSeek-V4's cache specs in Ascend's page formats, and what a block id costs (torch-free).

The core's table (``deepseek_v4/kv_cache.py``) says which caches a model has and their blocks; this
module changes what Ascend does otherwise: the type of index keys, the C128 state block of A5, and
the padding of state pages. Names of the geometry are re-exported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.kv_cache import deepseek_v4_kv_cache_specs
from vllm.v1.core.layout.packing import packed_block_stride
from vllm.v1.kv_cache_interface import (
    CompressorStateSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    member_spec,
)
from vllm_ascend.core.geometry import (
    Generation,
    V4Geometry,
    check_kernel_rows,
    get_dsv4_compressed_kv_block_size,
    v4_geometry,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "PACKED_BYTES_PER_UNIT_TOKEN",
    "PUBLISHED_BYTES_PER_BLOCK",
    "CompressAttentionSpec",
    "Generation",
    "PageDtypes",
    "V4Geometry",
    "aggregate_page_size_bytes",
    "ascend_kv_cache_specs",
    "explain_bytes_per_block",
    "get_dsv4_compressed_kv_block_size",
    "model_geometry",
    "unpack_groups",
    "v4_geometry",
]

# What vllm-ascend reports for V4-Flash with MTP on A2/A3, by --block-size.
PUBLISHED_BYTES_PER_BLOCK: Mapping[int, int] = MappingProxyType(
    {32: 845_184, 64: 1_690_368, 128: 3_380_736}
)
# What our grouping gives for the published models with MTP on A2/A3, per token of --block-size.
PACKED_BYTES_PER_UNIT_TOKEN: Mapping[str, int] = MappingProxyType(
    {"V4-Flash": 24_234, "V4-Pro": 34_620}
)
_PUBLISHED_ROW_TENSORS, _PUBLISHED_INDEXER_TENSORS = 23, 22


@dataclass(frozen=True, kw_only=True)
class CompressAttentionSpec(MLAAttentionSpec):
    """Entries of compressed attention (C4, its indexer, C128) in Ascend's pages.

    A class of its own so that the registry can give Ascend's manager to them.

    Raises:
        ConfigError: The rows of a page do not suit the kernels.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel_rows(self.storage_block_size)


@dataclass(frozen=True, slots=True)
class PageDtypes:
    """Types of cached values, passed in so that this module needs no torch.

    Attributes:
        rows: Window rows and entries.
        index: One byte per value for quantised index rows with their scale behind them; None:
            index keys as ``rows``.
        state: Compressor rows.
    """

    rows: "torch.dtype"
    index: "torch.dtype | None"
    state: "torch.dtype"


def ascend_kv_cache_specs(
    config: DeepseekV4Config,
    block_size: int | None,
    dtypes: PageDtypes,
    generation: Generation = Generation.A2_A3,
) -> dict[str, KVCacheSpec]:
    """Build the cache spec of every layer, MTP's included.

    Args:
        config: The architecture.
        block_size: ``--block-size``; None: 32.
        dtypes: Types of the pages. With ``index`` set the pages are the device's, state padding
            included; without it (reference mode in fp32) they are the core's.
        generation: Of the device. On an A5 the bytes of a row beside its values are part of its
            width.

    Raises:
        ConfigError: The block size is refused, or disagrees with the variable.
    """
    geometry = model_geometry(config, block_size, generation)
    check_kernel_rows(geometry.unit)
    specs = deepseek_v4_kv_cache_specs(config, geometry.unit, dtypes.rows, dtypes.state)
    return {name: _CHANGES[type(spec)](spec, geometry, dtypes) for name, spec in specs.items()}


def model_geometry(
    config: DeepseekV4Config, block_size: int | None, generation: Generation
) -> V4Geometry:
    """Return the geometry of a model's own head sizes.

    Raises:
        ConfigError: As ``v4_geometry``.
    """
    return v4_geometry(
        block_size,
        generation,
        head_dim=config.head_dim,
        index_head_dim=config.index_head_dim,
        rope_dim=config.qk_rope_head_dim,
    )


def _row_shape(
    spec: MLAAttentionSpec | SlidingWindowMLASpec, geometry: V4Geometry, dtypes: PageDtypes
) -> "tuple[int, torch.dtype]":
    """Return width and type of a row in the device's pages, or in float ones."""
    if dtypes.index is None:
        return spec.head_size, spec.dtype
    page, dtype = geometry.row_page, dtypes.rows
    if spec.is_indexer:
        page, dtype = geometry.indexer_page, dtypes.index
    return page // (geometry.unit * dtype.itemsize), dtype


def _entries(
    spec: MLAAttentionSpec, geometry: V4Geometry, dtypes: PageDtypes
) -> CompressAttentionSpec:
    width, dtype = _row_shape(spec, geometry, dtypes)
    return CompressAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=1,
        head_size=width,
        dtype=dtype,
        compress_ratio=spec.compress_ratio,
        is_indexer=spec.is_indexer,
    )


def _window_rows(
    spec: SlidingWindowMLASpec, geometry: V4Geometry, dtypes: PageDtypes
) -> SlidingWindowMLASpec:
    width, dtype = _row_shape(spec, geometry, dtypes)
    return replace(spec, head_size=width, head_size_v=None, dtype=dtype)


def _state_page(
    spec: CompressorStateSpec, geometry: V4Geometry, dtypes: PageDtypes
) -> CompressorStateSpec:
    if not spec.state_overlap:
        spec = replace(spec, block_size=min(spec.block_size, geometry.c128_state_block))
    if dtypes.index is None:
        return spec
    padded = geometry.indexer_page if spec.is_indexer else geometry.row_page
    return replace(spec, page_size_padded=max(padded, spec.real_page_size_bytes))


# What Ascend does otherwise than the core, by kind of cache.
_CHANGES: Mapping[type[KVCacheSpec], Callable[[Any, V4Geometry, PageDtypes], KVCacheSpec]] = (
    MappingProxyType(
        {
            MLAAttentionSpec: _entries,
            SlidingWindowMLASpec: _window_rows,
            CompressorStateSpec: _state_page,
        }
    )
)


# ----------------------------------------------------------------------------- groups and bytes


def unpack_groups(groups: Sequence[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    """Return the groups with one member's spec for each group of unequal pages.

    A block size is then always that of a real spec.

    Raises:
        ConfigError: Members of a group disagree on the block size.
    """
    unpacked = []
    for group in groups:
        spec = group.kv_cache_spec
        sizes = {member.block_size for member in spec.members()}
        if sizes != {spec.block_size}:
            raise ConfigError(
                f"A KV cache group of {spec.block_size}-token blocks has members of "
                f"{sorted(sizes)} tokens: {', '.join(group.layer_names[:4])}, ..."
            )
        unpacked.append(replace(group, kv_cache_spec=member_spec(spec)))
    return unpacked


def aggregate_page_size_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes of one page of every layer of every group together."""
    return sum(spec.page_size_bytes for group in groups for spec in group.layer_specs().values())


def explain_bytes_per_block(groups: Sequence[KVCacheGroupSpec], unit: int) -> str:
    """Return a sentence on what one block id costs, beside the published number.

    The published one is for V4-Flash with MTP on A2/A3: a tensor for each of 23 row slots and 22
    indexer slots. Slot i is as wide as the widest page at position i of any group, so every block
    pays for all of them. Our packed row is as wide as the widest group alone.
    """
    models = " and ".join(
        f"{count * unit} for {model}" for model, count in PACKED_BYTES_PER_UNIT_TOKEN.items()
    )
    flash = v4_geometry(unit)
    return (
        f"{packed_block_stride(groups)} bytes per block id at --block-size {unit}: one packed row "
        f"as wide as the widest group (a page of every layer of all {len(groups)} groups: "
        f"{aggregate_page_size_bytes(groups)} bytes). With MTP on an A2 or A3, packed rows have "
        f"{models}; {PUBLISHED_BYTES_PER_BLOCK[unit]} is published for V4-Flash, which is "
        f"{_PUBLISHED_ROW_TENSORS} row tensors of {flash.row_page} and "
        f"{_PUBLISHED_INDEXER_TENSORS} indexer tensors of {flash.indexer_page} bytes a block, each "
        "as wide as the widest page at its place in any group."
    )
