"""The rows of a KV cache in host memory, as the bytes they are: nothing is copied on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.handover.frames import Buffer
from vllm.distributed.kv_transfer.handover.regions import Region
from vllm.v1.core.geometry import GroupGeometry

if TYPE_CHECKING:
    import torch

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

# Pages of one block lie one behind the other, each padded to a cache line.
_PADDING_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer's cache.

    Attributes:
        memory: All bytes of the pool they are in.
        offset: Where the page of block 0 begins.
        stride: Bytes from a block's page to the next one's.
        num_rows: Rows of a page.
        row_bytes: Bytes of a row.
    """

    memory: memoryview
    offset: int
    stride: int
    num_rows: int
    row_bytes: int


def row_range(group: GroupGeometry, num_rows: int, region: Region) -> tuple[int, int]:
    """Return the rows ``[first, end)`` of a layer's page that a region names."""
    tokens_per_row = group.block_size // num_rows
    start = region.block_index * group.block_size
    return (region.first - start) // tokens_per_row, (region.end - start) // tokens_per_row


class HostMemory:
    """Row memory on a CPU.

    Args:
        kv_caches: Each layer's view ``[num_blocks, rows, width]``.
        groups: The KV cache groups with their layers.
        geometry: The same groups, as the cache's policy sees them.

    Owns: views of the pool's bytes; the tensors outlive it.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[KVCacheGroupSpec],
        geometry: Sequence[GroupGeometry],
    ) -> None:
        self._geometry = geometry
        # Held: the bytes below are theirs.
        self._tensors = dict(kv_caches)
        pools: dict[int, memoryview] = {}
        self._layers = [
            [_find_pages(self._tensors[name], pools) for name in group.layer_names]
            for group in groups
        ]
        self._pools = tuple(pools.values())

    @property
    def pools(self) -> tuple[memoryview, ...]:
        """All bytes of all pools."""
        return self._pools

    def source(self, region: Region, block_id: int) -> list[Buffer]:
        """Return a region's bytes where they lie."""
        return list(self.target(region, block_id))

    def target(self, region: Region, block_id: int) -> list[memoryview]:
        """Return a region's bytes where they lie."""
        group = self._geometry[region.group_id]
        spans: list[tuple[memoryview, int, int]] = []
        for pages in self._layers[region.group_id]:
            first, end = row_range(group, pages.num_rows, region)
            page = pages.offset + block_id * pages.stride
            low, high = page + first * pages.row_bytes, page + end * pages.row_bytes
            if spans:
                memory, start, stop = spans[-1]
                is_whole = first == 0 and end == pages.num_rows
                if is_whole and memory is pages.memory and 0 <= low - stop < _PADDING_BYTES:
                    spans[-1] = (memory, start, high)
                    continue
            spans.append((pages.memory, low, high))
        return [memory[low:high] for memory, low, high in spans]

    def layer_pages(self, group_id: int) -> Sequence[LayerPages]:
        """Return where the pages of a group's layers lie."""
        return self._layers[group_id]

    def layer_rows(self, region: Region, block_id: int) -> list[memoryview]:
        """Return a region's bytes where they lie, layer by layer and without padding."""
        group = self._geometry[region.group_id]
        found = []
        for pages in self._layers[region.group_id]:
            first, end = row_range(group, pages.num_rows, region)
            page = pages.offset + block_id * pages.stride
            low, high = page + first * pages.row_bytes, page + end * pages.row_bytes
            found.append(pages.memory[low:high])
        return found

    def commit(self, region: Region, block_id: int, received: list[memoryview]) -> None:
        """Do nothing: the bytes were received where they belong."""


def _find_pages(view: torch.Tensor, pools: dict[int, memoryview]) -> LayerPages:
    _, num_rows, width = view.shape
    storage = view.untyped_storage()
    address = storage.data_ptr()
    if address not in pools:
        raw = (ctypes.c_char * storage.nbytes()).from_address(address)
        pools[address] = memoryview(raw).cast("B")
    return LayerPages(
        pools[address],
        int(view.storage_offset()) * view.element_size(),
        int(view.stride(0)) * view.element_size(),
        num_rows,
        width * view.element_size(),
    )
