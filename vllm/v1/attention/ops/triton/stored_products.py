"""Products with matrices as they are stored, whatever they are stored as."""

import torch

from vllm.v1.attention.ops import stored_products as by_torch
from vllm.v1.attention.ops.stored import PLAIN, MatrixStack, PanelStack, RowSource
from vllm.v1.attention.ops.triton.panels import panel_product, read_panel_rows
from vllm.v1.attention.ops.triton.products import grouped_product, stack_linear
from vllm.v1.attention.ops.triton.routing import Routing, choose_rows_per_block, route


def stored_linear(x: torch.Tensor, source: RowSource, *, is_invariant: bool = True) -> torch.Tensor:
    """See ``stored_products.stored_linear``: weights are decoded to the input's type.

    The parts of a matrix are multiplied one by one, each in its place of the result.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty((len(x), source.num_rows))
    first = 0
    for part in source.leaves():
        own = out[:, first : first + part.num_rows]
        first += part.num_rows
        stack = part.find_stack()
        if not part.num_rows:
            continue
        if stack is None:
            own.copy_(by_torch.stored_linear(x, part))
        elif isinstance(stack, PanelStack):
            panel_product(x, stack, own, is_invariant=is_invariant)
        else:
            stack_linear(x, stack, is_invariant=is_invariant, out=own)
    return out


def map_pairs(
    x: torch.Tensor,
    stack: MatrixStack,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    is_gather: bool,
) -> torch.Tensor:
    """Maps each pair's row by its expert's matrix; see ``grouped_product``."""
    if not isinstance(stack, PanelStack):
        return grouped_product(x, stack, routing, bias, is_gather=is_gather)
    out = x.new_empty((routing.num_pairs, stack.out_size))
    panel_product(x, stack, out, is_invariant=True, routing=routing, bias=bias, is_gather=is_gather)
    return out


def stored_grouped_linear(
    x: torch.Tensor, source: RowSource, num_groups: int, *, is_invariant: bool = True
) -> torch.Tensor:
    """See ``stored_products.stored_grouped_linear``: a slice is a row that chose its matrix."""
    whole = source.find_stack()
    stack = None if whole is None else whole.split(num_groups)
    if stack is None:
        return by_torch.stored_grouped_linear(x, source, num_groups)
    num_rows = len(x)
    ids = torch.arange(num_groups, device=x.device).expand(num_rows, -1)
    rows = choose_rows_per_block(num_rows * num_groups, num_groups, is_invariant=is_invariant)
    routing = route(ids, num_groups, rows)
    mapped = map_pairs(x.reshape(-1, x.shape[-1]), stack, routing, is_gather=False)
    return mapped.view(num_rows, num_groups, stack.out_size)


def read_stored_rows(source: RowSource, row_ids: torch.Tensor) -> torch.Tensor:
    """See ``stored_products.read_stored_rows``: nothing waits for the ids."""
    stack = source.find_stack()
    if isinstance(stack, PanelStack):
        return read_panel_rows(stack, row_ids)
    if stack is not None and stack.kind == PLAIN:
        return stack.codes[0][row_ids].float()
    return by_torch.read_stored_rows(source, row_ids)
