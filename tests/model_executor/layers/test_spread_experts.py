"""Whole experts dealt out: what the ranks make of their own adds up to what one makes of all."""

import torch

from vllm.model_executor.layers.spread_experts import run_own_experts
from vllm.v1.attention.ops.registry import get_reference_op

GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(5, 8, generator=GENERATOR)
MATRICES = torch.randn(6, 8, 8, generator=GENERATOR)
# Token 4 chose experts of the first half alone, token 3 of the second.
IDS = torch.tensor([[0, 5], [3, 2], [1, 4], [3, 4], [2, 0]])
WEIGHTS = torch.rand(5, 2, generator=GENERATOR)


def run(own: range, ids: torch.Tensor = IDS) -> torch.Tensor:
    run_experts = get_reference_op("run_experts")
    return run_own_experts(
        X, ids, WEIGHTS, own, lambda rows, i: rows @ MATRICES[own.start + i].T, run_experts
    )


def test_ranks_add_up() -> None:
    whole = get_reference_op("run_experts")(X, IDS, WEIGHTS, lambda rows, i: rows @ MATRICES[i].T)
    first, second = run(range(3)), run(range(3, 6))
    assert not first[3].any()
    assert not second[4].any()
    torch.testing.assert_close(first + second, whole)


def test_a_rank_that_nobody_chose_adds_nothing() -> None:
    assert not run(range(3), torch.full((5, 2), 4)).any()
