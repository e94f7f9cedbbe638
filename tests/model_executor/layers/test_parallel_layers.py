"""Parallel layers: a group of one does nothing; shares of a fake group add up to the whole."""

from dataclasses import dataclass

import pytest
import torch

from vllm.distributed.parallel_state import SingleProcessGroup, TensorParallelGroup
from vllm.exceptions import ConfigError
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    GroupedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    TensorFactory,
)
from vllm.model_executor.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.attention.ops.registry import get_reference_op


@dataclass
class RecordingGroup:
    """One of several processes; collectives only record what they were given."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def factory(group: TensorParallelGroup) -> TensorFactory:
    return TensorFactory(torch.float32, torch.device("cpu"), group, get_reference_op)


ONE = factory(SingleProcessGroup())
TWO = [factory(RecordingGroup(rank, 2)) for rank in range(2)]
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(3, 8, generator=GENERATOR)
WEIGHT = torch.randn(6, 8, generator=GENERATOR)


def test_replicated_parts_are_views() -> None:
    layer = ReplicatedLinear(8, (2, 4), ONE)
    first, second = layer.weight_parts()
    first.copy_(WEIGHT[:2])
    second.copy_(WEIGHT[2:])
    torch.testing.assert_close(layer(X), X @ WEIGHT.T)
    assert not layer.weight.requires_grad


def test_column_shares_concatenate() -> None:
    shares = []
    for rank, make in enumerate(TWO):
        layer = ColumnParallelLinear("heads", 8, 6, make)
        layer.weight.copy_(WEIGHT[3 * rank : 3 * rank + 3])
        shares.append(layer(X))
    torch.testing.assert_close(torch.cat(shares, -1), X @ WEIGHT.T)


def test_row_shares_sum() -> None:
    total = torch.zeros(3, 6)
    for rank, make in enumerate(TWO):
        layer = RowParallelLinear("inner", 8, 6, make)
        layer.weight.copy_(WEIGHT[:, 4 * rank : 4 * rank + 4])
        total += layer(X[:, 4 * rank : 4 * rank + 4].contiguous())
    torch.testing.assert_close(total, X @ WEIGHT.T)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_groups_use_their_own_matrix(num_rows: int) -> None:
    layer = GroupedColumnParallelLinear("groups", 2, 4, 3, ONE)
    layer.weight.copy_(WEIGHT[:, :4])
    x = X[:num_rows]
    expected = torch.cat([x[:, :4] @ WEIGHT[:3, :4].T, x[:, 4:] @ WEIGHT[3:, :4].T], -1)
    torch.testing.assert_close(layer(x), expected)


def test_vocabulary_shares_sum_and_concatenate() -> None:
    ids = torch.tensor([5, 0, 3])
    total, logits = torch.zeros(3, 8), []
    for rank, make in enumerate(TWO):
        embedding = VocabParallelEmbedding(6, 8, make)
        embedding.weight.copy_(WEIGHT[3 * rank : 3 * rank + 3])
        total += embedding(ids)
        logits.append(ParallelLMHead(6, 8, make, tied=embedding)(X))
    torch.testing.assert_close(total, WEIGHT[ids])
    torch.testing.assert_close(torch.cat(logits, -1), X @ WEIGHT.T)


def test_head_is_fp32_whatever_the_model() -> None:
    make = TensorFactory(
        torch.bfloat16, torch.device("cpu"), SingleProcessGroup(), get_reference_op
    )
    head = ParallelLMHead(6, 8, make)
    head.weight.copy_(WEIGHT)
    assert head(X.bfloat16()).dtype == torch.float32


def test_an_axis_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads is 7, which --tensor-parallel-size 2"):
        ColumnParallelLinear("heads", 8, 7, TWO[0])


def test_a_group_of_one_is_the_identity() -> None:
    group = SingleProcessGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(X) is X
    assert group.all_gather(X) is X
