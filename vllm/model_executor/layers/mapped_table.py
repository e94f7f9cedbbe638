"""A table of which each step reads a few rows: left in its file, and mapped."""

import torch
from torch import nn
from torch.nn.functional import embedding

from vllm.model_executor.layers.linear import TensorFactory


class MappedTable(nn.Module):
    """Rows by token id, in whatever type they are stored.

    The loader hands over the values as they lie in the file (``take``), so that memory holds the
    pages of rows that occurred, which the system may drop again. Every process maps the whole.

    Args:
        name: Published name.
        num_rows: Rows.
        width: Values of a row.
        make: Says of which type and where rows are used.
    """

    def __init__(self, name: str, num_rows: int, width: int, make: TensorFactory) -> None:
        super().__init__()
        self.name = name
        self._decode = make.row_decoder(name, width)
        # No parameter: nothing is allocated, and moving the model leaves it.
        self.rows = torch.empty(num_rows, width, dtype=make.dtype, device="meta")
        if self._decode is not None:
            sizes = num_rows, self._decode.row_bytes
            self.rows = torch.empty(sizes, dtype=torch.uint8, device="meta")
        self._dtype, self._device = make.dtype, make.device

    def take(self, rows: torch.Tensor) -> None:
        """Uses these values, which must outlive nothing: the table keeps them."""
        self.rows = rows

    def move_to_device(self) -> None:
        """Keeps the values where they are used: a step then never asks the host for them."""
        self.rows = self.rows.to(self._device)

    @property
    def is_coded(self) -> bool:
        """Whether rows are stored in another way than as values."""
        return self._decode is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows as they are stored."""
        return self.rows.nbytes

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to [T, width] in the model's type."""
        token_ids = token_ids.to(self.rows.device)
        if self._decode is None:
            rows = embedding(token_ids, self.rows)
        else:
            rows = self._decode(self.rows[token_ids])
        return rows.to(device=self._device, dtype=self._dtype)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns tensor name -> a tensor of the table's shape on no device."""
        return {self.name: self.rows}
