"""The longest prefix that groups of different specs can serve together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.utils.hashing import BlockHash
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.whole_block.manager_base import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True, slots=True)
class SpecGroups:
    """The KV-cache groups of one spec, looked up together.

    Attributes:
        spec: Their spec.
        manager_class: Its manager.
        group_ids: The groups, ascending.
        block_size: Tokens of a block.
        drop_eagle_block: Whether a hit drops its last matched block for a drafter.
    """

    spec: KVCacheSpec
    manager_class: type[SingleTypeKVCacheManager]
    group_ids: tuple[int, ...]
    block_size: int
    drop_eagle_block: bool


class HybridLookup:
    """Narrows a candidate length until all specs accept it.

        candidate   cap -> full attention: 192 -> window: 160 -> state: 96 -> window: 96, done
                                                  lowered       lowered      accepted again

    Each spec finds the longest hit up to the candidate and so accepts or lowers it. Full attention
    comes first: its hits hold at every shorter length, so it is asked once and trimmed. The others
    are asked again until the candidate they accepted is the final one; every round lowers it by at
    least one alignment, so there are at most ``hit / alignment`` rounds, in practice one or two.

    Args:
        managers: One per group, in group order.
        block_pool: The pool.
        alignment_tokens: A hit's length is a multiple of it.
        context_parallel: Decode and prefill context-parallel world sizes.
    """

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        block_pool: BlockPool,
        *,
        alignment_tokens: int,
        context_parallel: tuple[int, int] = (1, 1),
    ) -> None:
        self._managers = managers
        self._block_pool = block_pool
        self._alignment_tokens = alignment_tokens
        self._dcp_world_size, self._pcp_world_size = context_parallel
        group_ids_by_spec: dict[KVCacheSpec, list[int]] = {}
        for group_id, manager in enumerate(managers):
            group_ids_by_spec.setdefault(manager.kv_cache_spec, []).append(group_id)
        assert len(group_ids_by_spec) > 1, "A hybrid model has groups of at least two specs."
        specs = [self._spec_groups(spec, ids) for spec, ids in group_ids_by_spec.items()]
        # Stable: full attention first, else in the order of the groups.
        self._specs = sorted(specs, key=lambda s: not s.manager_class.is_downward_closed)

    def _spec_groups(self, spec: KVCacheSpec, group_ids: Sequence[int]) -> SpecGroups:
        managers = [self._managers[group_id] for group_id in group_ids]
        manager_class = type(managers[0])
        return SpecGroups(
            spec,
            manager_class,
            tuple(group_ids),
            managers[0].block_size,
            manager_class.drops_eagle_block and any(m.use_eagle for m in managers),
        )

    @property
    def eagle_managers(self) -> list[SingleTypeKVCacheManager]:
        """Managers whose hits drop a block for a drafter, siblings of one spec included."""
        return [
            self._managers[group_id]
            for groups in self._specs
            if groups.drop_eagle_block
            for group_id in groups.group_ids
        ]

    def find(
        self, block_hashes: list[BlockHash], max_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Return the blocks of the longest common hit by group, and its tokens."""
        hit_blocks: list[list[KVCacheBlock]] = [[] for _ in self._managers]
        # Per spec the length its blocks in hit_blocks are for.
        accepted: list[int | None] = [None] * len(self._specs)
        length = max(max_length, 0)
        is_stable = False
        while not is_stable:
            is_stable = True
            for i, groups in enumerate(self._specs):
                if accepted[i] == length:
                    continue
                if accepted[i] is not None and groups.manager_class.is_downward_closed:
                    accepted[i] = length
                    continue
                view = self._block_pool.hash_index.hashes_at(block_hashes, groups.block_size)
                found = self._find_in_spec(groups, view, length, max_length)
                for group_id, blocks in zip(groups.group_ids, found, strict=True):
                    hit_blocks[group_id] = blocks
                length = len(found[0]) * groups.block_size
                if length == 0:
                    return tuple([] for _ in self._managers), 0
                accepted[i] = length
            is_stable = all(accepted_length == length for accepted_length in accepted)
        for groups in self._specs:
            for group_id in groups.group_ids:
                del hit_blocks[group_id][length // groups.block_size :]
        return tuple(hit_blocks), length

    def _find_in_spec(
        self, groups: SpecGroups, block_hashes: BlockHashList, length: int, max_length: int
    ) -> tuple[list[KVCacheBlock], ...]:
        """Find one spec's longest hit up to ``length``.

        The block a drafter drops lies beyond the candidate, so one block more is looked at.
        """
        if groups.drop_eagle_block:
            length = min(length + groups.block_size, max_length)
        return groups.manager_class.find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=length,
            kv_cache_group_ids=list(groups.group_ids),
            block_pool=self._block_pool,
            kv_cache_spec=groups.spec,
            drop_eagle_block=groups.drop_eagle_block,
            alignment_tokens=self._alignment_tokens,
            dcp_world_size=self._dcp_world_size,
            pcp_world_size=self._pcp_world_size,
        )
