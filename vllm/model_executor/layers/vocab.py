"""Token embedding and output head, shared out over the vocabulary."""

import torch
from torch import nn
from torch.nn.functional import embedding

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.linear import TensorFactory
from vllm.model_executor.layers.quantization.products import multiply_plain
from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.v1.attention.ops.stored import RowSource


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding table, shared out by token id.

    Args:
        name: Published name of the table.
        matrix_name: Its name without ".weight", if it may be quantised; else empty.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        make: TensorFactory,
        name: str = "embed.weight",
        matrix_name: str = "",
    ) -> None:
        super().__init__()
        self._group = make.group
        self._dtype = make.dtype
        self._read_rows = make.ops("read_stored_rows")
        self._rows = shard_size("vocab_size", vocab_size, make.group)
        self.quantised = make.quantised_matrix(matrix_name, hidden_size, self._rows)
        self._packed: RowSource | None = None
        self.weight = make.parameter(
            0 if self.quantised else self._rows,
            hidden_size,
            dtype=make.kept_dtype(make.dtype, name),
        )

    def find_rows(self) -> RowSource | None:
        """Returns the table as stored rows; None where a platform reads it its own way."""
        return PlainRows(self.weight.data) if self.quantised is None else self.quantised.row_source

    def read_from(self, packed: RowSource) -> None:
        """Reads rows from another form of the table, now that the weight is given back."""
        self._packed = packed

    def weight_slots(self, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination of the table ``name``."""
        if self.quantised is None:
            return {f"{name}.weight": self.weight.data}
        return self.quantised.slots(name)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to [T, D]."""
        source = self._packed
        if self.quantised is not None:
            source = self.quantised.row_source
            assert source is not None, "a table's rows can be decoded"
        if source is not None:
            rows: torch.Tensor = self._read_rows(source, token_ids)
            return rows.to(self._dtype)
        if self._group.size == 1:
            return embedding(token_ids, self.weight).to(self._dtype)
        local = token_ids - self._group.rank * self._rows
        is_ours = (local >= 0) & (local < self._rows)
        rows = embedding(local.clamp(0, self._rows - 1), self.weight).to(self._dtype)
        return self._group.all_reduce(rows * is_ours[:, None])


class ParallelLMHead(nn.Module):
    """Output matrix, shared out by token id; logits are fp32, as rounded ones tie.

    Kept in fp32, to be widened once and not at every step; next to quantised matrices as stored.

    Args:
        tied: An embedding that is the head too, or None.
        name: Published name of the matrix.
        matrix_name: Its name without ".weight", if it may be quantised; else empty.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        make: TensorFactory,
        tied: VocabParallelEmbedding | None = None,
        name: str = "head.weight",
        matrix_name: str = "",
    ) -> None:
        super().__init__()
        self._group = make.group
        self._linear, self._stored_linear = make.ops("linear"), make.ops("stored_linear")
        if tied is not None:
            self.quantised, self.weight = tied.quantised, tied.weight
        else:
            num_rows = shard_size("vocab_size", vocab_size, make.group)
            self.quantised = make.quantised_matrix(matrix_name, hidden_size, num_rows)
            self.weight = make.parameter(
                0 if self.quantised else num_rows,
                hidden_size,
                dtype=make.kept_dtype(torch.float32, name),
            )

    def find_rows(self) -> RowSource | None:
        """Returns the matrix as stored rows; None where a platform reads it its own way."""
        return PlainRows(self.weight.data) if self.quantised is None else self.quantised.row_source

    def weight_slots(self, name: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination of the matrix ``name``, which is not tied."""
        if self.quantised is None:
            return {f"{name}.weight": self.weight.data}
        return self.quantised.slots(name)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [M, D] to fp32 logits [M, V]."""
        if self.quantised is None:
            logits = multiply_plain(hidden.float(), self.weight, self._linear, self._stored_linear)
        else:
            logits = self.quantised(hidden.float())
        return self._group.all_gather(logits)
