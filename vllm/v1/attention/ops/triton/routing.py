"""Pairs of token and expert in blocks of one expert, sorted without a word from the host."""

from dataclasses import dataclass

import torch

from vllm.v1.attention.ops.triton.launch import IS_INTERPRETED, divide_up

FEW_ROWS, MANY_ROWS = 16, 64
# Programs that keep a large card's processors reading, and the least steps of a loop that one of
# them is worth.
_ENOUGH_PROGRAMS = 512
_LEAST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of token and chosen expert, laid out so that a block of rows has one expert.

    Attributes:
        pairs: int32 [blocks * rows_per_block]: pair of each row; ``num_pairs`` where there is none.
        experts: int32 [blocks]: expert of each block; the number of experts: nothing to do.
        num_pairs: Tokens times experts of each.
        num_chosen: Experts per token; pair p is of token p // num_chosen.
        rows_per_block: Rows of a block.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    num_pairs: int
    num_chosen: int
    rows_per_block: int


def choose_rows_per_block(num_pairs: int, num_experts: int, *, is_invariant: bool) -> int:
    """Return the rows of a block; where results must not depend on the batch, always the same."""
    if is_invariant or IS_INTERPRETED:
        return MANY_ROWS
    return FEW_ROWS if num_pairs <= FEW_ROWS * num_experts else MANY_ROWS


@dataclass(frozen=True, slots=True)
class Splits:
    """How the sum over the inputs of a product of one matrix is cut.

    Attributes:
        count: Parts, whose sums are added in order.
        num_steps: Steps of the loop over the inputs in each part but the last.
        are_programs: Whether each part is summed by a program of its own, into memory of its own;
            else one program takes them in turn.
    """

    count: int
    num_steps: int
    are_programs: bool = False

    @property
    def num_programs(self) -> int:
        """Programs that share a block of outputs."""
        return self.count if self.are_programs else 1

    @property
    def num_turns(self) -> int:
        """Parts that each of them takes."""
        return 1 if self.are_programs else self.count


def choose_splits(num_rows: int, num_blocks: int, num_steps: int, *, is_invariant: bool) -> Splits:
    """Return how a product's sums are cut.

    A few rows give too few programs to read a narrow matrix at a card's speed. Where results must
    not depend on the batch, many rows are summed by the same parts, which then costs a program
    more registers and gains nothing.

    Args:
        num_rows: Of the step.
        num_blocks: Blocks of outputs that the matrix has.
        num_steps: Steps of the loop over its inputs.
        is_invariant: Whether a row's bits must not depend on the batch.
    """
    count = max(1, min(_ENOUGH_PROGRAMS // num_blocks, num_steps // _LEAST_STEPS))
    steps = divide_up(num_steps, count)
    count = divide_up(num_steps, steps)
    is_few = num_rows <= FEW_ROWS
    if count == 1 or not (is_few or is_invariant or IS_INTERPRETED):
        return Splits(1, num_steps)
    return Splits(count, steps, are_programs=is_few)


def route(expert_ids: torch.Tensor, num_experts: int, rows_per_block: int) -> Routing:
    """Sorts pairs by expert on the device: no shape depends on what was chosen.

    Args:
        expert_ids: [T, k].
        num_experts: E; ids are below it.
        rows_per_block: Rows of a block.
    """
    flat = expert_ids.reshape(-1).long()
    num_pairs, device = flat.shape[0], flat.device
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + (rows_per_block - 1)) // rows_per_block * rows_per_block
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    expert = flat[order]
    rank = torch.arange(num_pairs, device=device) - (counts.cumsum(0) - counts)[expert]
    num_blocks = min(num_pairs, num_pairs // rows_per_block + num_experts)
    pairs = torch.full((num_blocks * rows_per_block,), num_pairs, dtype=torch.int32, device=device)
    pairs[(ends - padded)[expert] + rank] = order.int()
    firsts = torch.arange(num_blocks, device=device) * rows_per_block
    experts = torch.searchsorted(ends, firsts, right=True).int()
    return Routing(pairs, experts, num_pairs, expert_ids.shape[-1], rows_per_block)
