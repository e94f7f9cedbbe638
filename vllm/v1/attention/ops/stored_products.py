"""Products with matrices that are decoded tile by tile, while they are multiplied."""

from collections.abc import Callable, Sequence

import torch

from vllm.v1.attention.ops import reference
from vllm.v1.attention.ops.stored import RowSource

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# A tile of 1 M values (4 MiB of fp32) is multiplied while it is in the cache. With more rows of
# input the product, not the decoding, takes the time, and how MKL sums then depends on the tile: a
# tile of 64 M values (256 MiB, the scratch a step needs) holds most matrices whole, so that results
# are those of a plain matrix bit for bit.
_MAX_FEW_ROWS = 8
_CACHED_TILE_VALUES = 1 << 20
MAX_TILE_VALUES = 1 << 26


def stored_linear(
    x: torch.Tensor, source: RowSource, linear: Linear = reference.linear
) -> torch.Tensor:
    """Maps [T, in] to [T, out] of the same type by fp32 products of decoded values.

    Args:
        x: [T, in].
        source: The matrix.
        linear: Multiplies fp32 by a decoded tile.
    """
    if not x.shape[0]:
        return x.new_empty((0, source.num_rows))
    wide = x.float()
    parts = parts_by_inputs(source)
    products = [_multiply_rounded(part.round_inputs(wide), part, linear, x.dtype) for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def parts_by_inputs(source: RowSource) -> Sequence[RowSource]:
    """Returns a matrix in parts that each take their inputs in one way."""
    leaves = source.leaves()
    return (source,) if all(leaf.inputs == "whole" for leaf in leaves) else leaves


def _multiply_rounded(
    wide: torch.Tensor, source: RowSource, linear: Linear, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, step = source.num_rows, _tile_rows(len(wide), source.num_columns)
    if step >= num_rows:
        return linear(wide, _decode(source, 0, num_rows, wide.device)).to(dtype)
    output = wide.new_empty((len(wide), num_rows), dtype=dtype)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        output[:, start:stop] = linear(wide, _decode(source, start, stop, wide.device))
    return output


def stored_grouped_linear(x: torch.Tensor, source: RowSource, num_groups: int) -> torch.Tensor:
    """Maps slices by the matrix's blocks of rows: [T, g, in] to [T, g, out / g].

    Args:
        x: [T, g, in].
        source: The matrix [out, in]; rows of a group are neighbours.
        num_groups: g.
    """
    rows_per_group = source.num_rows // num_groups
    if not x.shape[0]:
        return x.new_empty((0, num_groups, rows_per_group))
    wide = source.round_inputs(x.float().flatten(0, 1)).view(x.shape)
    step = max(1, _tile_rows(x.shape[0], source.num_columns) // rows_per_group)
    parts = []
    for first in range(0, num_groups, step):
        stop = min(first + step, num_groups)
        rows = _decode(source, first * rows_per_group, stop * rows_per_group, x.device)
        weight = rows.view(stop - first, rows_per_group, -1)
        parts.append(reference.grouped_linear(wide[:, first:stop], weight).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def read_stored_rows(source: RowSource, row_ids: torch.Tensor) -> torch.Tensor:
    """Returns rows of a matrix by number: fp32 [N, num_columns] for int64 [N]."""
    different, places = torch.unique(row_ids, return_inverse=True)
    rows = torch.empty((len(different), source.num_columns), device=row_ids.device)
    for place, row in enumerate(different.tolist()):
        source.write_rows(row, rows[place : place + 1])
    return rows[places]


def _tile_rows(num_inputs: int, num_columns: int) -> int:
    """Returns the rows of a matrix to decode at a time."""
    values = _CACHED_TILE_VALUES if num_inputs <= _MAX_FEW_ROWS else MAX_TILE_VALUES
    return max(1, values // num_columns)


def _decode(source: RowSource, start: int, stop: int, device: torch.device) -> torch.Tensor:
    rows = torch.empty((stop - start, source.num_columns), dtype=torch.float32, device=device)
    source.write_rows(start, rows)
    return rows
