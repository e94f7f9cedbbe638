"""Rows of the pool as plain bytes, layer by layer, without the padding between pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm.distributed.kv_transfer.handover.host_memory import HostMemory, LayerPages
from vllm.distributed.kv_transfer.handover.regions import Region
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.kv_offload.layout import ObjectLayout

if TYPE_CHECKING:
    import torch

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


class PoolRows(Protocol):
    """Where the rows of an object are."""

    def gather(self, regions: Sequence[Region], blocks: PrefixBlocks, out: memoryview) -> None:
        """Copy the regions of an object out of the pool."""
        ...

    def scatter(self, regions: Sequence[Region], blocks: PrefixBlocks, data: memoryview) -> None:
        """Copy an object into the pool: its dense rows from ``blocks.dense_from`` on."""
        ...


class _Walk:
    """Walks the layers' rows of an object's regions."""

    def __init__(self, layout: ObjectLayout) -> None:
        self._layout = layout

    def clip(self, region: Region, dense_from: int) -> Region | None:
        """Return the part of a region that is not in the pool yet; None: all of it is."""
        group = self._layout.groups[region.group_id]
        if group.is_window or region.first >= dense_from:
            return region
        first = dense_from // group.ratio * group.ratio
        if first >= region.end:
            return None
        return Region(region.group_id, region.block_index, max(first, region.first), region.end)


def find_block(blocks: PrefixBlocks, region: Region) -> int:
    """Return the id of the block that holds a region."""
    group = region.group_id
    return blocks.block_ids[group][region.block_index - blocks.bases[group]]


class HostRows(_Walk):
    """Rows in host memory.

    Args:
        layout: What objects are made of.
        memory: The pool.
    """

    def __init__(self, layout: ObjectLayout, memory: HostMemory) -> None:
        super().__init__(layout)
        self._memory = memory
        self._pages = [
            [_as_blocks(pages) for pages in memory.layer_pages(group.group_id)]
            for group in layout.groups
        ]
        self._block_bytes: list[int] = [
            sum(int(page.shape[1]) for page in group) for group in self._pages
        ]

    def gather(self, regions: Sequence[Region], blocks: PrefixBlocks, out: memoryview) -> None:
        """Copy the regions of an object out of the pool."""
        at = 0
        for run in self._find_runs(regions):
            if len(run) > 1:
                at = self._gather_blocks(run, blocks, out, at)
                continue
            (region,) = run
            for view in self._memory.layer_rows(region, find_block(blocks, region)):
                out[at : at + len(view)] = view
                at += len(view)

    def scatter(self, regions: Sequence[Region], blocks: PrefixBlocks, data: memoryview) -> None:
        """Copy an object into the pool."""
        at = 0
        for run in self._find_runs(regions):
            if len(run) > 1 and self.clip(run[0], blocks.dense_from) == run[0]:
                at = self._scatter_blocks(run, blocks, data, at)
            else:
                at = self._scatter_rows(run, blocks, data, at)

    def _find_runs(self, regions: Sequence[Region]) -> Iterator[Sequence[Region]]:
        """Iterate over regions, whole blocks of a group that follow one another together."""
        start = 0
        for index, region in enumerate(regions):
            size = self._layout.groups[region.group_id].block_size
            is_whole = region.end - region.first == size
            before = regions[max(start, index - 1)]
            goes_on = region.block_index - before.block_index <= 1
            if not is_whole or region.group_id != before.group_id or not goes_on:
                if start < index:
                    yield regions[start:index]
                start = index
            if not is_whole:
                yield regions[index : index + 1]
                start = index + 1
        if start < len(regions):
            yield regions[start:]

    def _gather_blocks(
        self, run: Sequence[Region], blocks: PrefixBlocks, out: memoryview, at: int
    ) -> int:
        group, ids = run[0].group_id, _find_ids(run, blocks)
        end = at + len(ids) * self._block_bytes[group]
        part, low = np.frombuffer(out[at:end], np.uint8).reshape(len(ids), -1), 0
        for page in self._pages[group]:
            part[:, low : low + page.shape[1]] = page[ids]
            low += page.shape[1]
        return end

    def _scatter_blocks(
        self, run: Sequence[Region], blocks: PrefixBlocks, data: memoryview, at: int
    ) -> int:
        group, ids = run[0].group_id, _find_ids(run, blocks)
        end = at + len(ids) * self._block_bytes[group]
        part, low = np.frombuffer(data[at:end], np.uint8).reshape(len(ids), -1), 0
        for page in self._pages[group]:
            page[ids] = part[:, low : low + page.shape[1]]
            low += page.shape[1]
        return end

    def _scatter_rows(
        self, run: Sequence[Region], blocks: PrefixBlocks, data: memoryview, at: int
    ) -> int:
        """Copy rows of single blocks, as far as they are not in the pool yet."""
        for region in run:
            wanted = self.clip(region, blocks.dense_from)
            size = self._layout.groups[region.group_id].block_size
            views = (
                None
                if wanted is None
                else self._memory.layer_rows(wanted, find_block(blocks, wanted))
            )
            for number, layer in enumerate(self._layout.layers[region.group_id]):
                length = (region.end - region.first) * layer.num_rows // size * layer.row_bytes
                if views is not None:
                    # The rows that are there already come first.
                    view = views[number]
                    view[:] = data[at + length - len(view) : at + length]
                at += length
        return at


def _as_blocks(pages: LayerPages) -> NDArray[np.uint8]:
    """Return the bytes of a layer's pages ``[blocks, bytes]``, where they lie."""
    length = pages.num_rows * pages.row_bytes
    raw = np.frombuffer(pages.memory, np.uint8)[pages.offset :]
    num_blocks = (len(raw) - length) // pages.stride + 1
    return np.lib.stride_tricks.as_strided(raw, (num_blocks, length), (pages.stride, 1))


def _find_ids(run: Sequence[Region], blocks: PrefixBlocks) -> NDArray[np.int64]:
    group, first = run[0].group_id, run[0].block_index - blocks.bases[run[0].group_id]
    return np.array(blocks.block_ids[group][first : first + len(run)], np.int64)


class StagedRows(_Walk):
    """Rows on a device, copied through host memory.

    Args:
        layout: What objects are made of.
        kv_caches: Each layer's view ``[num_blocks, rows, width]``.
        groups: The KV cache groups with their layers.
    """

    def __init__(
        self,
        layout: ObjectLayout,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[KVCacheGroupSpec],
    ) -> None:
        super().__init__(layout)
        # Here, because it needs torch: a front end imports this package to check its settings.
        from vllm.distributed.kv_transfer.handover.staged_memory import (  # noqa: PLC0415
            StagedMemory,
        )

        self._memory = StagedMemory(kv_caches, groups, layout.groups)

    def gather(self, regions: Sequence[Region], blocks: PrefixBlocks, out: memoryview) -> None:
        """Copy the regions of an object off the device."""
        at = 0
        for region in regions:
            for part in self._memory.source(region, find_block(blocks, region)):
                out[at : at + len(part)] = part
                at += len(part)

    def scatter(self, regions: Sequence[Region], blocks: PrefixBlocks, data: memoryview) -> None:
        """Copy an object to the device."""
        at = 0
        for region in regions:
            wanted = self.clip(region, blocks.dense_from)
            size = self._layout.groups[region.group_id].block_size
            parts = []
            for layer in self._layout.layers[region.group_id]:
                row = layer.num_rows * layer.row_bytes
                length = (region.end - region.first) * row // size
                kept = 0 if wanted is None else (wanted.end - wanted.first) * row // size
                parts.append(data[at + length - kept : at + length])
                at += length
            if wanted is not None:
                self._memory.commit(wanted, find_block(blocks, wanted), parts)


def make_pool_rows(
    layout: ObjectLayout,
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[KVCacheGroupSpec],
) -> PoolRows:
    """Return the rows of a pool, wherever it is."""
    if all(view.device.type == "cpu" for view in kv_caches.values()):
        return HostRows(layout, HostMemory(kv_caches, groups, layout.groups))
    return StagedRows(layout, kv_caches, groups)
