"""Recurrent states: what all tokens of a prefix left behind, of one size whatever their number.

A state is many times as large as the attention rows of a block of tokens, so it is cut over as many
blocks of the pool as it fills. The states of all layers are one cache: a request holds, loads and
drops them together, and no block of it is left half empty between layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_cache_specs.base import KVCacheSpec, KVCacheSpecKind, PackingKey
from vllm.v1.kv_cache_specs.geometry import GroupGeometry
from vllm.v1.kv_cache_specs.layouts import GroupLayout, PageLayout, StateLayout, StateShape

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class RecurrentStateSpec(KVCacheSpec):
    """The states of all recurrent layers of a model.

    ``block_size`` is the unit of hits: a state ends where a prefix can.

    Attributes:
        shape: What it is made of.
        page_values: Values of a block's page; wider pages hold more heads.
        dtype: Of a value.
    """

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.MAMBA
    has_checkpoints: ClassVar[bool] = True
    needs_packed_pool: ClassVar[bool] = True

    shape: StateShape
    page_values: int
    dtype: torch.dtype

    @property
    def label(self) -> str:
        """What people call it."""
        return "recurrent state"

    @property
    def layout(self) -> StateLayout:
        """Where the parts of a state lie in its blocks."""
        return StateLayout(self.shape, self.page_values)

    @property
    def wire_name(self) -> str:
        """Its class and shape: pages of one size can hold states that differ."""
        shape = self.shape
        sizes = (shape.num_layers, shape.num_heads, shape.key_dim, shape.value_dim)
        return f"{super().wire_name}({', '.join(map(str, (*sizes, shape.num_channels)))})"

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        """Describe a group that needs the one state behind the last token."""
        return GroupGeometry(
            group_id,
            True,
            unit,
            align=unit,
            is_recurrent=True,
            num_pieces=self.layout.num_blocks,
        )

    def page_layout(self) -> PageLayout:
        """Return one row of all the page's values."""
        return PageLayout(1, self.page_values, self.dtype)

    def attention_layout(self) -> GroupLayout:
        """Return states, with where their parts lie."""
        return GroupLayout("recurrent", self.block_size, 1, state=self.layout)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block."""
        return self.page_values * self.dtype.itemsize

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of two states: the one a step read, and the one it wrote."""
        del vllm_config
        return 2 * self.layout.num_blocks * self.page_size_bytes

    def packing_key(self) -> PackingKey:
        """Return its place behind the window groups."""
        return (2, self.shape.num_values, self.block_size, self.kind)

    def uniform_key(self) -> tuple[Any, ...]:
        """Return the shape."""
        return ("recurrent state", self.shape)
