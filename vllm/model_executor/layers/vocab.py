"""Token embedding and output head, shared out over the vocabulary."""

import torch
from torch import nn
from torch.nn.functional import embedding

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.linear import TensorFactory


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding table, shared out by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, make: TensorFactory) -> None:
        super().__init__()
        self._group = make.group
        self._rows = shard_size("vocab_size", vocab_size, make.group)
        self.weight = make.parameter(self._rows, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to [T, D]."""
        if self._group.size == 1:
            return embedding(token_ids, self.weight)
        local = token_ids - self._group.rank * self._rows
        is_ours = (local >= 0) & (local < self._rows)
        rows = embedding(local.clamp(0, self._rows - 1), self.weight)
        return self._group.all_reduce(rows * is_ours[:, None])


class ParallelLMHead(nn.Module):
    """Output matrix, shared out by token id; kept in fp32, as are the logits.

    A head of lower precision would have to be widened at every step: rounded logits tie.

    Args:
        tied: An embedding whose weight is the head's too, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        make: TensorFactory,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self._group = make.group
        self._linear = make.ops("linear")
        if tied is not None:
            self.weight = tied.weight
        else:
            self.weight = make.parameter(
                shard_size("vocab_size", vocab_size, make.group), hidden_size, dtype=torch.float32
            )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [M, D] to fp32 logits [M, V]."""
        return self._group.all_gather(self._linear(hidden.float(), self.weight.float()))
