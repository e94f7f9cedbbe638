"""How a layer's part of a block is read: by the attention ops, and by whoever moves memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    import torch

GroupKind = Literal["window", "state", "dense", "keys", "recurrent"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one request's states are made of.

    Attributes:
        num_layers: Recurrent layers.
        num_heads: Of each; 0: a state is its columns alone.
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

    blocks of a state   | heads 0..5 of layer 0 | 6..11 | ... | last heads | columns 0..c | ... |
    a head              a matrix [K, V], whole in one block
    columns             the last inputs of the short convolutions, by channel: [W - 1, channels]

    Attributes:
        shape: The parts.
        page_values: Values of one block's page, at least a head's state and a channel's columns.
    """

    shape: StateShape
    page_values: int

    @property
    def heads_per_block(self) -> int:
        """Heads in each of the first blocks, counted through all layers."""
        return self.page_values // max(1, self.shape.head_values)

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


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Geometry of one KV group, as the attention ops see it.

    Attributes:
        kind: "window" (the last tokens' latent rows), "state" (open compressor rows), "dense"
            (compressed entries, kept forever), "keys" (keys and values of every token, or of a
            window's) or "recurrent" (one state, cut over several blocks).
        block_size: Tokens one block covers.
        rows_per_block: Rows one block stores.
        ratio: Tokens per compressed entry; 1 for "window" and "keys".
        window: Tokens attended, the query's own included; 0: all, or another kind.
        has_overlap: A "state" group whose entries also read the window before theirs.
        state: A "recurrent" group's: where the parts of a state lie in its blocks.
    """

    kind: GroupKind
    block_size: int
    rows_per_block: int
    ratio: int = 1
    window: int = 0
    has_overlap: bool = False
    state: StateLayout | None = None


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One layer's page, as an array ``[rows, width]``.

    Attributes:
        rows: Rows a block stores.
        width: Values of a row.
        dtype: Of a value.
    """

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows fill; the page may be larger."""
        return self.rows * self.width * self.dtype.itemsize
