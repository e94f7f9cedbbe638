"""What is cached, as chains of prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm.v1.core.kv_cache_coordinator import as_served
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.shared_pool import SharedPool
from vllm.v1.core.values.hit import Checkpoint

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import TieredPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.prefix.prefix_cache import PrefixCache
    from vllm.v1.request import Request

HELD = "held"


class Share(msgspec.Struct, frozen=True):
    """What a tenant has of the pool, in blocks.

    Attributes:
        tenant: Its name; "": all who have no share of their own.
        guaranteed: Blocks that others cannot take.
        at_most: Blocks above which it gives first.
        held: Its requests hold so many.
        cached: So many more keep what it computed.
    """

    tenant: str
    guaranteed: int
    at_most: int
    held: int
    cached: int


def tier_name(pool: TieredPool, block: KVCacheBlock) -> str:
    """Return where a block stands, as people read it."""
    tier = pool.tier_of(block)
    return HELD if tier is None else tier.name.lower()


class PrefixSource:
    """What is cached, as chains of prefixes.

    The index knows who continues whom where a model has windows; else the chains are those of the
    requests that were seen.

    Owns: those chains.

    Attributes:
        pool: The blocks.
        unit: Tokens between two prefixes of a chain.

    Args:
        prefixes: What is cached.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self.pool, self.unit = prefixes.pool, prefixes.geometry.unit
        self._index = prefixes.index
        self._keys = next(iter(prefixes.index.keys.values()), None)
        self._notes_chains = not prefixes.index.keeps_lineage
        self._noted: dict[BlockHash, BlockHash | None] = {}

    def hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return a request's prefixes, one per ``unit`` tokens."""
        return request.block_hashes

    def note(self, request: Request) -> None:
        """Take note of a request's chain, where the index does not keep chains."""
        if not self._notes_chains:
            return
        parent: BlockHash | None = None
        for own in request.block_hashes:
            self._noted.setdefault(own, parent)
            parent = own

    def parents(self) -> Mapping[BlockHash, BlockHash | None]:
        """Return each cached prefix with the one a unit shorter; None for a prompt's first."""
        if not self._notes_chains:
            return self._index.lineage.parents
        self._noted = {h: p for h, p in self._noted.items() if self.block_of(h) is not None}
        return self._noted

    def block_of(self, prefix_hash: BlockHash) -> KVCacheBlock | None:
        """Return a block of the first group with a prefix's last rows; None: there is none."""
        if self._keys is not None:
            return self._keys.get(prefix_hash)
        record = self._index.checkpoints.get(prefix_hash)
        return None if record is None else record.blocks[0][-1]

    def checkpoint(self, prefix_hash: BlockHash) -> Checkpoint | None:
        """Return the window state at a prefix's end, if there is any."""
        return self._index.checkpoints.get(prefix_hash)

    def shares(self) -> list[Share]:
        """Return what tenants have of the pool; none: it is everybody's."""
        pool = self.pool
        if not isinstance(pool, SharedPool):
            return []
        names = {number: name for name, number in pool.shares.partitions.items()}
        return [
            Share(
                names.get(number, ""),
                pool.shares.guaranteed[number],
                pool.shares.at_most[number],
                owned.held,
                owned.free,
            )
            for number, owned in enumerate(pool.owned())
        ]

    def free_by_tier(self) -> dict[str, int]:
        """Return how many free blocks stand in each tier that has some."""
        counts = {tier.name.lower(): self.pool.tiers[tier].num_free_blocks for tier in Tier}
        return {name: count for name, count in counts.items() if count}


def make_source(manager: KVCacheManager) -> PrefixSource:
    """Return the source of an engine's cache."""
    return PrefixSource(as_served(manager.coordinator).prefixes)
