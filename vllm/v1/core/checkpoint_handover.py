"""Prefixes that other engines read and write, with hits at one unit: rows and their checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.coordinator_interface import Coordinator
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.prefix.checkpoints import Checkpoint
from vllm.v1.core.prefix.exports import PlacedCheckpoint, PrefixBlocks
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

    def list_checkpoints(
        self, block_hashes: list[BlockHash], end: int
    ) -> Sequence[PlacedCheckpoint]:
        """Return the checkpoints in the first ``end`` tokens of a prompt."""
        known = self.index.checkpoints
        found = (known.get(key) for key in block_hashes[: end // self.geometry.unit])
        return [
            PlacedCheckpoint(r.position, r.standing, r.next_token) for r in found if r is not None
        ]

    def locate_rows(
        self, block_hashes: list[BlockHash], first: int, end: int
    ) -> PrefixBlocks | None:
        """Return where the dense rows of tokens ``[first, end)`` lie."""
        return self._locate(block_hashes, first, end, None)

    def locate_checkpoint(
        self, block_hashes: list[BlockHash], position: int, dense_from: int
    ) -> PrefixBlocks | None:
        """Return where the window rows of a checkpoint lie, and dense rows from a token on."""
        record = self.index.checkpoints.get(block_hashes[position // self.geometry.unit - 1])
        if record is None:
            return None
        return self._locate(block_hashes, dense_from, position, record)

    def _locate(
        self,
        block_hashes: list[BlockHash],
        first: int,
        end: int,
        record: Checkpoint | None,
    ) -> PrefixBlocks | None:
        bases = [0] * len(self.geometry.groups)
        ids: list[tuple[int, ...]] = [()] * len(self.geometry.groups)
        for group in self.geometry.dense:
            keys, size, ratio = self.index.keys[group.group_id], group.block_size, group.ratio
            low, high = first // ratio * ratio, end // ratio * ratio
            found = []
            for index in group.block_range(low, high):
                last = min((index + 1) * size, high)
                block = keys.get(block_hashes[last // self.geometry.unit - 1])
                if block is None:
                    return None
                found.append(block.block_id)
            bases[group.group_id], ids[group.group_id] = low // size, tuple(found)
        if record is not None:
            for group, blocks in zip(self.geometry.windows, record.blocks, strict=True):
                bases[group.group_id] = group.rows_below(end).start
                ids[group.group_id] = tuple(block.block_id for block in blocks)
        next_token = None if record is None else record.next_token
        return PrefixBlocks(end, first, tuple(bases), tuple(ids), next_token)

    def find_import(
        self,
        request: Request,
        num_tokens: int,
        num_external_tokens: int,
        next_token: int | None = None,
    ) -> PrefixBlocks:
        """Return where a connector shall write the rows of an allocated request's prefix."""
        cache = self.requests[request.request_id]
        assert cache.dense_from is not None, "the request does not load"
        cache.loaded_next_token = next_token
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
            if cache.loaded_next_token is not None:
                self._publisher.note_loaded(cache, num_computed_tokens, cache.loaded_next_token)
