"""Recurrent states: what all tokens of a prefix left behind, of one size whatever their number.

A state is many times as large as the attention rows of a block of tokens, so it is cut over as many
blocks of the pool as it fills. The states of all layers are one cache: a request holds, loads and
drops them together, and no block of it is left half empty between layers.

    blocks of a state   | heads 0..5 of layer 0 | 6..11 | ... | last heads | columns 0..c | ... |
    a head              a matrix [K, V], whole in one block
    columns             the last inputs of the short convolutions, by channel: [W - 1, channels]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_specs.base import KVCacheSpec, KVCacheSpecKind, PackingKey
from vllm.v1.kv_cache_specs.geometry import GroupGeometry
from vllm.v1.kv_cache_specs.layouts import GroupLayout, PageLayout

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one request's states are made of.

    Attributes:
        num_layers: Recurrent layers.
        num_heads: Of each.
        key_dim, value_dim: A head's state is a matrix of so many rows and columns.
        num_channels: Inputs of a layer's short convolutions.
        num_columns: Earlier inputs that a convolution reads of each channel.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    num_channels: int
    num_columns: int

    @property
    def head_values(self) -> int:
        """Values of one head's state."""
        return self.key_dim * self.value_dim

    @property
    def num_values(self) -> int:
        """Values of everything."""
        heads = self.num_heads * self.head_values
        return self.num_layers * (heads + self.num_channels * self.num_columns)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the parts of a state lie in its blocks.

    Attributes:
        shape: The parts.
        page_values: Values of one block's page, at least a head's state and a channel's columns.
    """

    shape: StateShape
    page_values: int

    @property
    def heads_per_block(self) -> int:
        """Heads in each of the first blocks, counted through all layers."""
        return self.page_values // self.shape.head_values

    @property
    def channels_per_block(self) -> int:
        """Channels in each of the other blocks, counted through all layers."""
        return self.page_values // self.shape.num_columns

    @property
    def num_head_blocks(self) -> int:
        """Blocks that hold heads."""
        return cdiv(self.shape.num_layers * self.shape.num_heads, self.heads_per_block)

    @property
    def num_blocks(self) -> int:
        """Blocks of a state."""
        num_channels = self.shape.num_layers * self.shape.num_channels
        return self.num_head_blocks + cdiv(num_channels, self.channels_per_block)


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
