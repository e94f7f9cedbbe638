"""Requests that resume on dense rows alone and compute the window rows again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.utils.hashing import BlockHash
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.lookup import find_dense_blocks
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.prefix.request_cache import RequestCache
from vllm.v1.core.retention.rebuild import Rebuild, find_rebuild
from vllm.v1.core.values.cache_step import RowBounds
from vllm.v1.core.values.hit import PrefixHit


def prefer_rebuild(
    index: PrefixIndex,
    geometry: CacheGeometry,
    num_tokens: int,
    block_hashes: Sequence[BlockHash],
    hit: PrefixHit,
) -> PrefixHit:
    """Return a hit on dense rows alone where that computes fewer tokens than the given one.

    Args:
        index: What is cached.
        geometry: The model's groups.
        num_tokens: Tokens before a boundary to compute again for the window rows there.
        block_hashes: Of the request.
        hit: What the lookup found.
    """
    boundary = geometry.floor_lean(hit.dense_match)
    rebuild = find_rebuild(num_tokens, geometry.unit, hit.position, boundary)
    if rebuild is None:
        return hit
    full, partial = find_dense_blocks(index, geometry, block_hashes, boundary)
    return replace(
        hit,
        position=boundary,
        full_blocks=full,
        partial_blocks=partial,
        checkpoint=None,
        lean_checkpoint=None,
        rebuild=rebuild,
        num_saved_tokens=rebuild.start - hit.position,
    )


class Rebuilds:
    """The requests that compute window rows again now.

    Owns: ``running``, by request.

    Args:
        geometry: The model's groups.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self.running: dict[str, RequestCache] = {}

    def begin(self, cache: RequestCache, rebuild: Rebuild) -> None:
        """Let a request that was just admitted compute window rows again."""
        cache.rebuild = rebuild
        self.running[cache.request.request_id] = cache

    def end(self, request_id: str) -> None:
        """Forget a request that leaves."""
        self.running.pop(request_id, None)

    def take_row_bounds(self) -> dict[str, RowBounds]:
        """Return what those requests write and read in this step that are not through by then."""
        found: dict[str, RowBounds] = {}
        for request_id, cache in tuple(self.running.items()):
            rebuild = cache.rebuild
            assert rebuild is not None
            if cache.request.num_computed_tokens >= rebuild.end:
                del self.running[request_id]
                continue
            write_from = tuple(
                rebuild.start if group.is_window else rebuild.end for group in self._geometry.groups
            )
            found[request_id] = RowBounds(write_from, rebuild.start)
        return found
