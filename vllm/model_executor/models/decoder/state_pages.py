"""One layer's part of recurrent states in their blocks (``kv_cache_specs/recurrent.py``)."""

import torch

from vllm.v1.kv_cache_interface import StateLayout, StateShape


class StatePages:
    """Reads and writes a layer's heads and convolution inputs.

    Args:
        pages: The states' cache, [num_blocks, 1, values].
        shape: What a state is made of.
        number: Which of the recurrent layers.
    """

    def __init__(self, pages: torch.Tensor, shape: StateShape, number: int) -> None:
        layout = StateLayout(shape, pages.shape[2])
        self._shape = shape
        flat = pages[:, 0]
        per_block, columns = layout.heads_per_block, layout.channels_per_block
        matrices = flat[:, : per_block * shape.head_values]
        self._heads = matrices.view(len(flat), per_block, shape.key_dim, shape.value_dim)
        rows = flat[:, : columns * shape.num_columns]
        self._columns = rows.view(-1, shape.num_columns, columns)
        device = pages.device
        heads = torch.arange(shape.num_heads, device=device) + number * shape.num_heads
        self._head_piece, self._head_slot = heads // per_block, heads % per_block
        channels = torch.arange(shape.num_channels, device=device) + number * shape.num_channels
        self._channel_piece = channels // columns + layout.num_head_blocks
        self._channel_slot = channels % columns

    def read(self, blocks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the state [H, K, V] and of the inputs before the next [W - 1, C].

        Args:
            blocks: int64, of a whole state; None: that before the first token, all zeros.
        """
        shape = self._shape
        if blocks is None:
            zeros = self._heads.new_zeros(shape.num_heads, shape.key_dim, shape.value_dim)
            return zeros, zeros.new_zeros(shape.num_columns, shape.num_channels)
        state = self._heads[blocks[self._head_piece], self._head_slot]
        left = self._columns[blocks[self._channel_piece], :, self._channel_slot]
        return state, left.T

    def write(self, blocks: torch.Tensor, state: torch.Tensor, left: torch.Tensor) -> None:
        """Stores a state and the last inputs in a state's blocks."""
        self._heads[blocks[self._head_piece], self._head_slot] = state
        self._columns[blocks[self._channel_piece], :, self._channel_slot] = left.T
