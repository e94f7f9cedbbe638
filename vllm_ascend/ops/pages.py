"""Rows of paged caches: scatter by npu_scatter_nd_update_, gather by aten, quantised row formats.

A cache of a float type holds rows as they are. Which of the others are written how is a device
generation's: see ``row_formats``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from vllm.exceptions import ConfigError
from vllm.v1.attention.ops import reference
from vllm.v1.attention.ops.registry import Op
from vllm_ascend.ops.row_formats import E4M3, Fp8IndexRows, Fp8KeyRows, Int8Rows, RowFormat

FormatFinder = Callable[[torch.Tensor], RowFormat | None]
"""From a cache [num_blocks, rows_per_block, width] to how its rows are written; None: as floats."""


class PageOps:
    """``write_rows``, ``read_rows`` and ``round_rows`` of a device generation.

    Args:
        find_format: Tells a cache's format.
    """

    def __init__(self, find_format: FormatFinder) -> None:
        self._find_format = find_format

    def write_rows(
        self, cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, values: torch.Tensor
    ) -> None:
        """As ``reference.write_rows``; a quantised cache quantises.

        Mutates:
            cache [num_blocks, rows_per_block, width].
        """
        if not blocks.shape[0]:
            return
        row_format = self._find_format(cache)
        indices = torch.stack([blocks, rows], -1)
        if row_format is None:
            torch.ops.npu.npu_scatter_nd_update_(cache, indices, values.to(cache.dtype))
        else:
            encoded = row_format.encode(values)
            torch.ops.npu.npu_scatter_nd_update_(cache.view(torch.int8), indices, encoded)

    def read_rows(
        self, cache: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """As ``reference.read_rows``; a quantised cache is dequantised."""
        row_format = self._find_format(cache)
        if row_format is None:
            return reference.read_rows(cache, blocks, rows, dtype)
        encoded = reference.read_rows(cache.view(torch.int8), blocks, rows, torch.int8)
        return row_format.decode(encoded, dtype)

    def round_rows(self, cache: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """As ``reference.round_rows``, through the cache's format."""
        row_format = self._find_format(cache)
        if not values.shape[0]:
            return values
        if row_format is None:
            return reference.round_rows(cache, values)
        return row_format.decode(row_format.encode(values), values.dtype)

    def by_name(self) -> Mapping[str, Op]:
        """Return the three by the names a model asks for."""
        ops = (self.write_rows, self.read_rows, self.round_rows)
        return MappingProxyType({op.__name__: op for op in ops})


_INT8_ROWS = Int8Rows()


def _find_a2_a3_format(cache: torch.Tensor) -> RowFormat | None:
    return _INT8_ROWS if cache.dtype == torch.int8 else None


A2_A3_PAGES = PageOps(_find_a2_a3_format)
"""Window rows and entries in 16 bits, index keys in int8."""


def make_a5_pages(head_dim: int, rope_dim: int, index_head_dim: int) -> PageOps:
    """Return the page ops of a model on an A5: keys and index keys in fp8.

    Both are e4m3 caches; a row's width tells which of the two it is.

    Args:
        head_dim: Values of a window row or entry.
        rope_dim: How many of them are rotary.
        index_head_dim: Values of an index key.

    Raises:
        ConfigError: The model's rows do not fit the format, or both kinds are equally wide.
    """
    keys, index_keys = Fp8KeyRows(head_dim, rope_dim), Fp8IndexRows()
    index_bytes = index_head_dim + index_keys.scale_bytes
    if keys.row_bytes == index_bytes:
        raise ConfigError(
            f"A5 pages tell keys from index keys by their width, but with head_dim={head_dim}, "
            f"qk_rope_head_dim={rope_dim} and index_head_dim={index_head_dim} both have "
            f"{index_bytes} bytes: this model needs --kv-cache-dtype float32 (reference mode), or "
            "an A2 or A3."
        )
    formats: dict[int, RowFormat] = {keys.row_bytes: keys, index_bytes: index_keys}

    def find_format(cache: torch.Tensor) -> RowFormat | None:
        return formats[cache.shape[-1]] if cache.dtype == E4M3 else None

    return PageOps(find_format)
