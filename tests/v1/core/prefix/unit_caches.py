"""Pools of hits at one unit, without a coordinator around them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.policies import VariantPolicy
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.pool.regular_tier import RegularTier
from vllm.v1.core.prefix.checkpoint_store import CheckpointStore
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.values.hit import Checkpoint


class UnitCache(NamedTuple):
    """A pool, what its blocks hold, and the checkpoints over it."""

    pool: TieredPool
    index: PrefixIndex
    store: CheckpointStore

    def add_key(
        self,
        block: KVCacheBlock,
        group_id: int,
        prefix_hash: BlockHash,
        parent: BlockHash | None = None,
    ) -> None:
        """Publish one prefix."""
        self.index.add_keys((block,), group_id, (prefix_hash,), (parent,))

    def get(self, prefix_hash: BlockHash, group_id: int) -> KVCacheBlock | None:
        """Return the block of a group that holds a prefix's last rows."""
        return self.index.keys[group_id].get(prefix_hash)

    def add_record(self, name: str, *blocks: KVCacheBlock, **fields: Any) -> Checkpoint:
        """Publish a checkpoint of two window groups: the first block, and the others."""
        record = Checkpoint(h(name), 32, (blocks[:1], blocks[1:]), **fields)
        assert self.store.publish(record, "maker")
        return record

    def tiers(self, *blocks: KVCacheBlock) -> list[Tier | None]:
        """Return where blocks stand."""
        return [self.pool.tier_of(block) for block in blocks]


def h(name: str) -> BlockHash:
    """Return a hash that shows what it stands for."""
    return BlockHash(name.encode())


def make_cache(
    num_blocks: int = 9,
    dense: Sequence[int] = (0, 1),
    windows: Sequence[int] = (),
    *,
    events: bool = False,
    max_pinned: int | None = None,
    supersedes: bool = True,
    ranks: bool = False,
) -> UnitCache:
    """Return an empty pool of hits at one unit."""
    geometry = CacheGeometry(32, (), 32)
    policy: RetentionPolicy = VariantPolicy(geometry, "test", supersedes=supersedes)
    if ranks:
        policy = AutoPolicy(geometry, num_blocks)
    index = PrefixIndex(num_blocks, dense, windows, KVEventWriter(events), ranks_blocks=ranks)
    choose = policy.choose_victim
    ranked = RegularTier(num_blocks, index, choose) if choose is not None else None
    pool = TieredPool(num_blocks, True, index, ranked)
    if max_pinned is not None:
        pool.enable_pinning(max_pinned)
    return UnitCache(pool, index, CheckpointStore(pool, index, policy))


# ---- whole prompts -----------------------------------------------------------------------------


def hashes(count: int, name: str = "p") -> list[BlockHash]:
    """Return the chained hashes of a prompt."""
    return [h(f"{name}{i}") for i in range(count)]


def cache_of(geometry: CacheGeometry, num_blocks: int = 2000) -> UnitCache:
    """Return an empty pool of a model's groups."""
    dense, windows = ([group.group_id for group in g] for g in (geometry.dense, geometry.windows))
    return make_cache(num_blocks, dense, windows)


def publish(
    cache: UnitCache,
    geometry: CacheGeometry,
    chain: list[BlockHash],
    held_back: set[tuple[int, int]],
    boundaries: set[int],
) -> None:
    """Cache a chain: all keys but ``held_back`` (group, unit), checkpoints at ``boundaries``."""
    for group in geometry.dense:
        blocks: dict[int, KVCacheBlock] = {}
        for i, prefix_hash in enumerate(chain):
            position = (i + 1) * geometry.unit
            if position % group.ratio or (group.group_id, i) in held_back:
                continue
            index = (position - 1) // group.block_size
            if index not in blocks:
                blocks[index] = cache.pool.get_new_blocks(1)[0]
            cache.add_key(blocks[index], group.group_id, prefix_hash)
    for i in boundaries:
        record = Checkpoint(chain[i], (i + 1) * geometry.unit, ((), (), (), ()))
        cache.store.publish(record, "maker")
