"""Which rows make an object. Pure functions over ints.

    tokens     0 ........ G ........ 2G ........ 3G .... P
    dense      |  rows    |   rows    |   rows    |state |    rows: shared by all that begin alike
    window                                        |state |    state: what else resuming at P takes

G is the least multiple of the unit and of all compress ratios whose dense rows are worth a write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm.distributed.kv_transfer.handover.regions import Region, list_regions, read_groups
from vllm.utils.math_utils import cdiv
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.store.cells import ObjectKind

# Below this a write costs more at the device than it brings.
_MIN_OBJECT_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows of one layer's pages.

    Attributes:
        num_rows: Rows of a page.
        row_bytes: Bytes of a row.
    """

    num_rows: int
    row_bytes: int


@dataclass(frozen=True)
class ObjectLayout:
    """The objects of a KV cache.

    Attributes:
        groups: Its groups.
        layers: Per group its layers.
        unit: Tokens under one prefix hash.
        lean: Tokens on whose multiples a checkpoint is smallest.
        group_tokens: Tokens whose dense rows are one object (G).
    """

    groups: tuple[GroupGeometry, ...]
    layers: tuple[tuple[LayerRows, ...], ...]
    unit: int
    lean: int
    group_tokens: int

    @cached_property
    def has_windows(self) -> bool:
        """Whether resuming takes more than dense rows."""
        return any(group.is_window for group in self.groups)

    @cached_property
    def _dense(self) -> tuple[GroupGeometry, ...]:
        return tuple(group for group in self.groups if not group.is_window)

    def list_object(self, kind: ObjectKind, first: int, end: int) -> tuple[Region, ...]:
        """Return the regions of an object, in the order of its bytes.

        Args:
            kind: Rows, or a state.
            first: The first token whose dense rows are in it.
            end: The boundary at which it stands.
        """
        groups = self._dense if kind is ObjectKind.ROWS else self.groups
        return list_regions(groups, end, first)

    def count_bytes(self, regions: Sequence[Region]) -> int:
        """Return the bytes of some regions."""
        total = 0
        for region in regions:
            size = self.groups[region.group_id].block_size
            for layer in self.layers[region.group_id]:
                total += (region.end - region.first) * layer.num_rows // size * layer.row_bytes
        return total

    @cached_property
    def _group_bytes(self) -> int:
        """Bytes of a row group, wherever it stands: it holds whole rows of all layers."""
        return self.count_bytes(self.list_object(ObjectKind.ROWS, 0, self.group_tokens))

    def object_bytes(self, kind: ObjectKind, first: int, end: int) -> int:
        """Return the bytes of an object."""
        if kind is ObjectKind.ROWS and end - first == self.group_tokens:
            # Asked of every group of a prompt whenever that is looked up.
            return self._group_bytes
        return self.count_bytes(self.list_object(kind, first, end))

    def usual_bytes(self) -> list[int]:
        """Return the sizes of usual objects, the commonest first."""
        far = 64 * self.group_tokens
        sizes = [self.object_bytes(ObjectKind.ROWS, far, far + self.group_tokens)]
        if self.has_windows:
            sizes.append(self.object_bytes(ObjectKind.STATE, far, far))
        return sizes


def make_layout(config: KVCacheConfig, unit: int) -> ObjectLayout:
    """Describe the objects of a KV cache.

    Raises:
        ConfigError: A group is of a kind that no worker lays out.
    """
    groups = read_groups(config)
    layers = []
    for group in config.kv_cache_groups:
        pages = (spec.page_layout() for spec in group.layer_specs().values())
        layers.append(
            tuple(LayerRows(page.rows, page.width * page.dtype.itemsize) for page in pages)
        )
    lean = unit
    for geometry in groups:
        lean = max(lean, geometry.ratio, geometry.align)
    layout = ObjectLayout(groups, tuple(layers), unit, lean, lean)
    dense_bytes = max(1, layout.object_bytes(ObjectKind.ROWS, 64 * lean, 65 * lean))
    group_tokens = lean * cdiv(_MIN_OBJECT_BYTES, dense_bytes)
    return ObjectLayout(groups, tuple(layers), unit, lean, group_tokens)
