"""Prefixes that other engines read and write, with hits at one unit: rows and their checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.coordinator_interface import Coordinator
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.exports import PrefixBlocks
from vllm.v1.core.prefix.lookup import find_prefix, hit_tables
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.prefix.publication import Publisher
from vllm.v1.core.request_cache import RequestCache

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CheckpointHandover(Coordinator):
    """The part of a coordinator that gives prefixes away and takes them in.

    Attributes:
        geometry: The model's groups.
        index: Keys and checkpoints.
        requests: Every request's tables and publications.
    """

    geometry: CacheGeometry
    index: PrefixIndex
    requests: dict[str, RequestCache]
    _publisher: Publisher

    def export_prefix(self, name: str, request: Request) -> PrefixBlocks | None:
        """Hold the longest prefix with a checkpoint for another engine to read."""
        max_tokens = request.num_prompt_tokens - 1
        hit = find_prefix(self.index, self.geometry, request.block_hashes, max_tokens)
        if hit.checkpoint is None:
            return None
        tables = hit_tables(self.geometry, hit)
        self.exports.hold(name, [blocks for _, blocks in tables])
        ids = tuple(tuple(block.block_id for block in blocks) for _, blocks in tables)
        bases = tuple(base for base, _ in tables)
        return PrefixBlocks(hit.position, 0, bases, ids, hit.checkpoint.next_token)

    def find_import(
        self, request: Request, num_tokens: int, num_external_tokens: int
    ) -> PrefixBlocks:
        """Return where a connector shall write the rows of an allocated request's prefix."""
        cache = self.requests[request.request_id]
        assert cache.dense_from is not None, "the request does not load"
        bases = [0] * len(self.geometry.groups)
        ids: list[tuple[int, ...]] = [()] * len(self.geometry.groups)
        for table in cache.dense:
            ids[table.geometry.group_id] = tuple(block.block_id for block in table.blocks)
        for window in cache.windows:
            bases[window.geometry.group_id] = window.base
            ids[window.geometry.group_id] = tuple(block.block_id for block in window.blocks)
        return PrefixBlocks(num_tokens, cache.dense_from, tuple(bases), tuple(ids))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish a prefix that a connector has written, with its checkpoint."""
        cache = self.requests[request.request_id]
        if cache.is_loading:
            cache.dense_from = None
            self._publisher.publish(cache, num_computed_tokens, (num_computed_tokens,))
