"""The two kinds of prefix index, as something with a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.prefix.checkpoints import Checkpoint
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.retention.tiers import Tier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.whole_block.hash_index import HashIndex
    from vllm.v1.request import Request

HELD = "held"


def tier_name(pool: BlockPool, block: KVCacheBlock) -> str:
    """Return where a block stands, as people read it."""
    tier = pool.tier_of(block)
    return HELD if tier is None else tier.name.lower()


class PrefixSource(ABC):
    """What is cached, as chains of prefixes.

    Owns: nothing of the cache.

    Attributes:
        pool: The blocks.
        unit: Tokens between two prefixes of a chain.
    """

    pool: BlockPool
    unit: int

    @abstractmethod
    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return a request's prefixes, one per ``unit`` tokens."""

    @abstractmethod
    def note(self, request: Request) -> None:
        """Take note of a request's chain, where the index does not keep chains."""

    @abstractmethod
    def parents(self) -> Mapping[BlockHash, BlockHash | None]:
        """Return each cached prefix with the one a unit shorter; None for a prompt's first."""

    @abstractmethod
    def block_of(self, prefix_hash: BlockHash) -> KVCacheBlock | None:
        """Return a block with a prefix's last rows; None if it is not cached."""

    @abstractmethod
    def checkpoint(self, prefix_hash: BlockHash) -> Checkpoint | None:
        """Return the window state at a prefix's end, if there is any."""

    @abstractmethod
    def free_by_tier(self) -> dict[str, int]:
        """Return how many free blocks stand in each tier that has some."""


class UnitSource(PrefixSource):
    """Hits at one unit: the index knows chains and checkpoints."""

    def __init__(self, manager: KVCacheManager, index: PrefixIndex, unit: int) -> None:
        self.pool, self.unit = manager.block_pool, unit
        self._index = index
        self._keys = next(iter(index.keys.values()), {})

    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return a request's prefixes."""
        return request.block_hashes

    def note(self, request: Request) -> None:
        """Do nothing: the index keeps chains."""

    def parents(self) -> Mapping[BlockHash, BlockHash | None]:
        """Return the index's own lineage."""
        return self._index.lineage.parents

    def block_of(self, prefix_hash: BlockHash) -> KVCacheBlock | None:
        """Return a block of the first dense group."""
        return self._keys.get(prefix_hash)

    def checkpoint(self, prefix_hash: BlockHash) -> Checkpoint | None:
        """Return the checkpoint."""
        return self._index.checkpoints.get(prefix_hash)

    def free_by_tier(self) -> dict[str, int]:
        """Return the lengths of the tiers."""
        counts = {tier.name.lower(): self.pool.tiers[tier].num_free_blocks for tier in Tier}
        return {name: count for name, count in counts.items() if count}


class BlockSource(PrefixSource):
    """Hits at whole blocks: chains are those of the requests that were seen.

    Owns: the chains.
    """

    def __init__(self, manager: KVCacheManager, index: HashIndex, block_size: int) -> None:
        self.pool, self.unit = manager.block_pool, block_size
        self._index = index
        self._parents: dict[BlockHash, BlockHash | None] = {}

    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of a request's blocks in the first group."""
        return self._index.hashes_at(request.block_hashes, self.unit)

    def note(self, request: Request) -> None:
        """Remember a request's chain, as far as it has hashes."""
        parent: BlockHash | None = None
        for own in self.hashes(request):
            self._parents.setdefault(own, parent)
            parent = own

    def parents(self) -> Mapping[BlockHash, BlockHash | None]:
        """Return the chains that are still cached; others are forgotten."""
        self._parents = {h: p for h, p in self._parents.items() if self.block_of(h) is not None}
        return self._parents

    def block_of(self, prefix_hash: BlockHash) -> KVCacheBlock | None:
        """Return a block of the first group."""
        return self._index.map.get_one_block(make_block_hash_with_group_id(prefix_hash, 0))

    def checkpoint(self, prefix_hash: BlockHash) -> Checkpoint | None:
        """Return None: there are none."""
        return None

    def free_by_tier(self) -> dict[str, int]:
        """Count the free blocks that cache something, and the others."""
        pool = self.pool
        free = (block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null)
        return dict(
            Counter(
                "scratch" if block.block_hash is None else tier_name(pool, block) for block in free
            )
        )


def make_source(manager: KVCacheManager) -> PrefixSource:
    """Return the source that a manager's index asks for."""
    pool, config = manager.block_pool, manager.kv_cache_config
    index = pool.index
    if isinstance(index, PrefixIndex):
        assert config.hit_unit is not None
        return UnitSource(manager, index, config.hit_unit)
    return BlockSource(manager, pool.hash_index, config.kv_cache_groups[0].kv_cache_spec.block_size)
