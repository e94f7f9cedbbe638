"""Whole experts dealt out to ranks: each runs its own for the tokens that chose them.

Every rank has every token, as attention's sum over the ranks leaves it, so nothing is sent to the
experts; their outputs meet in one sum over the ranks, with the shared expert's. Sending rows to
their experts and back instead moves more bytes until there are more than twice as many ranks as
experts per token: k rows there and back, and the outputs to all, against two rows a token.
"""

from collections.abc import Callable

import torch

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.linear import TensorFactory
from vllm.v1.attention.ops.stored import GatedExperts

RunExperts = Callable[..., torch.Tensor]


def find_share(make: TensorFactory, num_experts: int, inner_size: int) -> tuple[range, int]:
    """Returns the experts that this rank holds, and how much of their inner width.

    Raises:
        ConfigError: What is shared out does not divide evenly.
    """
    if make.share.spreads_experts:
        shard_size("number of experts", num_experts, make.group)
        return make.share.find_experts(num_experts), inner_size
    return range(num_experts), shard_size("width of an expert", inner_size, make.group)


def run_own_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    own: range,
    run_expert: Callable[[torch.Tensor, int], torch.Tensor],
    run_experts: RunExperts,
    num_experts: int | None = None,
    stacked: GatedExperts | None = None,
) -> torch.Tensor:
    """Sums each token's chosen experts as far as this rank holds them.

    Args:
        x: [T, D].
        expert_ids: int64 [T, k].
        weights: fp32 [T, k].
        own: The experts of this rank.
        run_expert: Maps rows [N, D] by an expert to [N, D]; experts count from the first of
            ``own``.
        run_experts: The platform's op.
        num_experts: Experts of all ranks; None: more than ``own``.
        stacked: All experts in one, which the op may take instead where this rank holds them all.

    Returns:
        [T, D]; zero where a token chose none of them.
    """
    if len(own) == num_experts:
        return run_experts(x, expert_ids, weights, run_expert, stacked)
    is_own = (expert_ids >= own.start) & (expert_ids < own.stop)
    tokens, choices = is_own.nonzero(as_tuple=True)
    output = torch.zeros_like(x)
    if not tokens.shape[0]:
        return output
    # A pair of token and own expert is a row that chose one expert.
    ids = (expert_ids[tokens, choices] - own.start).unsqueeze(1)
    mixed = run_experts(x[tokens], ids, weights[tokens, choices].unsqueeze(1), run_expert)
    return output.index_add_(0, tokens, mixed)
