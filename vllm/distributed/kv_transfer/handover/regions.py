"""Which rows travel when a prefix is handed over. Pure functions over ints.

    tokens     0 .......... dense_from ................................ num_tokens
    dense      | there already | one region per block, from row to row |
    window                                  whole blocks of the tail  |#|#|#|#|

Both engines work the list out from the same numbers, so a region is named by its place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of one block of one group.

    Attributes:
        group_id: The KV cache group.
        block_index: Token position // block size of the block.
        first: First token of the rows, in the prompt.
        end: One past the last.
    """

    group_id: int
    block_index: int
    first: int
    end: int


def read_groups(config: KVCacheConfig) -> tuple[GroupGeometry, ...]:
    """Describe the groups of a KV cache.

    Raises:
        ConfigError: A group is of a kind that cannot be handed over.
    """
    return tuple(
        group.geometry(i, config.hit_unit or group.kv_cache_spec.block_size)
        for i, group in enumerate(config.kv_cache_groups)
    )


def list_regions(
    groups: Sequence[GroupGeometry], num_tokens: int, dense_from: int
) -> tuple[Region, ...]:
    """Return what an engine needs that has the dense rows below ``dense_from``.

    Args:
        groups: The KV cache groups.
        num_tokens: The boundary at which it resumes.
        dense_from: A boundary at or below it.
    """
    regions: list[Region] = []
    for group in groups:
        size, ratio = group.block_size, group.ratio
        if group.is_window:
            for index in group.rows_below(num_tokens):
                regions.append(Region(group.group_id, index, index * size, (index + 1) * size))
            continue
        first, end = dense_from // ratio * ratio, num_tokens // ratio * ratio
        if first >= end:
            continue
        for index in range(first // size, cdiv(end, size)):
            low, high = max(first, index * size), min(end, (index + 1) * size)
            regions.append(Region(group.group_id, index, low, high))
    return tuple(regions)
