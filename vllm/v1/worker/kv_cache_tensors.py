"""The memory of the KV cache: pool tensors, and each layer's view of its pages in them.

A pool is a byte tensor ``[num_blocks, stride]``: block id b is row b of every pool. Two layouts:

    packed (``KVCacheTensor.block_stride``)     contract (one ``KVCacheTensor`` per layer slot)
    row b | L0 page | L1 page | L2 page |pad|   row b | the page of whichever layer's block b is |
          ^offset 0 ^offsets[L1]                      stride = the page's bytes, offset 0
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm.exceptions import ConfigError
from vllm.platforms.interface import Platform
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
)

_ALIGNMENT_BYTES = 64
_MAX_LISTED_NAMES = 8


@dataclass(frozen=True, slots=True)
class KVCachePool:
    """The tensors of one worker's KV cache.

    Attributes:
        tensors: uint8 ``[num_blocks, stride]``, one per ``KVCacheTensor``.
        layers: Cache name to its view ``[num_blocks, rows, width]``; the last dimension is
            contiguous, blocks are a stride apart.
        platform: Moves their memory.
        device: Where they are.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: Mapping[str, torch.Tensor]
    platform: Platform
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks whose state is read before it is first written."""
        self.platform.zero_blocks(self.tensors, block_ids)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to)."""
        self.platform.copy_blocks(self.tensors, copies)


def allocate_kv_cache(
    config: KVCacheConfig,
    expected_layers: Iterable[str],
    platform: Platform,
    device: torch.device,
) -> KVCachePool:
    """Allocate the pool and build every layer's view.

    Args:
        config: Blocks, tensors and groups.
        expected_layers: Names of the model's caches.
        platform: Allocates the memory.
        device: Where.

    Raises:
        ConfigError: The device lacks the memory, the names in ``config`` and ``expected_layers``
            differ, or a page does not fit in its place.
    """
    specs = collect_layer_specs(config)
    _check_names("KV cache groups", specs, expected_layers)
    placed = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by]
    _check_names("KV cache tensors", placed, specs)
    tensors = []
    layers: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        if not tensor.shared_by:
            continue  # padding of a layout with fewer layers than slots: nobody would touch it
        stride = _block_stride(tensor, config.num_blocks)
        pool = _allocate(platform, config.num_blocks, stride, device)
        tensors.append(pool)
        for name in tensor.shared_by:
            offset = 0 if tensor.offsets is None else tensor.offsets[name]
            layers[name] = view_layer(pool, name, specs[name], offset)
    return KVCachePool(tuple(tensors), layers, platform, device)


def _allocate(
    platform: Platform, num_blocks: int, stride: int, device: torch.device
) -> torch.Tensor:
    try:
        return platform.allocate_kv_pool(num_blocks, stride, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        size_gib = num_blocks * stride / 2**30
        raise ConfigError(
            f"The KV cache of {num_blocks} blocks needs {size_gib:,.2f} GiB, which {device} cannot "
            "give: lower --kv-cache-memory-bytes, --num-gpu-blocks-override or "
            "VLLM_CPU_KVCACHE_SPACE."
        ) from error


def collect_layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """Return each layer's own spec, groups of unequal layers unpacked."""
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        specs.update(group.layer_specs())
    return specs


def view_layer(pool: torch.Tensor, name: str, spec: KVCacheSpec, offset_bytes: int) -> torch.Tensor:
    """Return a layer's pages ``[num_blocks, rows, width]`` in the spec's dtype.

    Args:
        pool: uint8 ``[num_blocks, stride]``.
        name: The layer, for messages.
        spec: Its spec, which says how the page is laid out.
        offset_bytes: Where the layer's page begins in a pool row.

    Raises:
        ConfigError: The page leaves the row, is misaligned, or cannot be laid out.
    """
    try:
        page = spec.page_layout()
    except ConfigError as error:
        raise ConfigError(f"layer {name}: {error}") from error
    num_blocks, stride = pool.shape
    rows, width, itemsize = page.rows, page.width, page.dtype.itemsize
    end = offset_bytes + page.num_bytes
    if end > stride:
        raise ConfigError(f"layer {name}'s page ends at byte {end} of a row of {stride} bytes")
    if offset_bytes % itemsize or stride % itemsize:
        raise ConfigError(
            f"layer {name}'s page at byte {offset_bytes} of rows of {stride} bytes is not aligned "
            f"to its {page.dtype} elements of {itemsize} bytes"
        )
    elements = pool.view(-1).view(page.dtype)
    return elements.as_strided(
        (num_blocks, rows, width),
        (stride // itemsize, width, 1),
        elements.storage_offset() + offset_bytes // itemsize,
    )


def _block_stride(tensor: KVCacheTensor, num_blocks: int) -> int:
    if tensor.block_stride is None:
        if tensor.size % num_blocks:
            raise ConfigError(
                f"a KV cache tensor of {tensor.size} bytes for {tensor.shared_by} does not hold "
                f"{num_blocks} equal blocks"
            )
        return tensor.size // num_blocks
    # Wide loads and kernels on other devices rely on it.
    offsets = (tensor.offsets or {}).values()
    assert tensor.block_stride % _ALIGNMENT_BYTES == 0, tensor.block_stride
    assert all(offset % _ALIGNMENT_BYTES == 0 for offset in offsets), tensor.offsets
    return tensor.block_stride


def _check_names(what: str, given: Iterable[str], expected: Iterable[str]) -> None:
    given_names, expected_names = list(given), set(expected)
    missing = sorted(expected_names - set(given_names))
    extra = sorted(set(given_names) - expected_names)
    repeated = sorted({name for name in given_names if given_names.count(name) > 1})
    if not (missing or extra or repeated):
        return
    problems = [
        f"{len(names)} {label}: {_summarise(names)}"
        for label, names in (("missing", missing), ("extra", extra), ("repeated", repeated))
        if names
    ]
    raise ConfigError(
        f"The {what} do not match the model's {len(expected_names)} caches; {'; '.join(problems)}."
    )


def _summarise(names: list[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED_NAMES])
    rest = len(names) - _MAX_LISTED_NAMES
    return f"{listed} and {rest} more" if rest > 0 else listed
