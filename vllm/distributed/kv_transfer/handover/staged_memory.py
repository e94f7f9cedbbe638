"""The rows of a KV cache on a device: copied through host memory, region by region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from vllm.distributed.kv_transfer.handover.frames import Buffer
from vllm.distributed.kv_transfer.handover.host_memory import row_range
from vllm.distributed.kv_transfer.handover.regions import Region
from vllm.v1.core.geometry import GroupGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


class StagedMemory:
    """Row memory on any device: a region's rows layer by layer, without padding.

    What is received waits in host memory until it is verified; only then is the device written.

    Args:
        kv_caches: Each layer's view ``[num_blocks, rows, width]``.
        groups: The KV cache groups with their layers.
        geometry: The same groups, as the cache's policy sees them.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[KVCacheGroupSpec],
        geometry: Sequence[GroupGeometry],
    ) -> None:
        self._geometry = geometry
        self._views = [[kv_caches[name] for name in group.layer_names] for group in groups]

    def _rows(self, region: Region, block_id: int) -> list[torch.Tensor]:
        """Return a region's rows ``[rows, width]`` by layer, on the device."""
        group = self._geometry[region.group_id]
        found = []
        for view in self._views[region.group_id]:
            first, end = row_range(group, view.shape[1], region)
            found.append(view[block_id, first:end])
        return found

    def source(self, region: Region, block_id: int) -> list[Buffer]:
        """Return a copy of a region's bytes."""
        rows = (part.contiguous().view(torch.uint8).cpu() for part in self._rows(region, block_id))
        return [part.numpy().tobytes() for part in rows]

    def target(self, region: Region, block_id: int) -> list[memoryview]:
        """Return host memory for a region's bytes."""
        rows = self._rows(region, block_id)
        return [memoryview(bytearray(part.numel() * part.element_size())) for part in rows]

    def commit(self, region: Region, block_id: int, received: list[memoryview]) -> None:
        """Copy received bytes to the device."""
        for part, data in zip(self._rows(region, block_id), received, strict=True):
            host = torch.frombuffer(data, dtype=torch.uint8).view(part.dtype)
            part.copy_(host.view(part.shape))
