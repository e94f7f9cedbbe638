"""What is cached with hits at one unit, and the rules by which it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.checkpoint_store import CheckpointStore
from vllm.v1.core.prefix.events import KVEventWriter
from vllm.v1.core.prefix.pins import Pins
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.retention.auto.adaptation import Adaptation
from vllm.v1.core.retention.policy import pinned_share, resolve_policy
from vllm.v1.core.retention.sizes import check_room_for_one, max_checkpoint_blocks

if TYPE_CHECKING:
    from vllm.v1.core.cache_settings import CacheSettings
    from vllm.v1.metrics.stats import CachePolicyStats
    from vllm.v1.request import Request


class PrefixCache:
    """The pool with its index and its checkpoints, and what is known of the model and the traffic.

    Those who plan steps, publish prefixes and let requests wait share it.

    Owns: the parts below.

    Attributes:
        geometry: The model's groups.
        policy: Which checkpoints are kept.
        index: Keys and checkpoints by prefix.
        pool: The blocks.
        store: The checkpoints' one writer.
        adaptation: What was learnt of the traffic; None: the policy does not learn.

    Args:
        settings: Groups, sizes and switches; ``hit_unit`` is set.

    Raises:
        ConfigError: Block sizes, the pool or the retention interval do not fit the model.
    """

    def __init__(self, settings: CacheSettings) -> None:
        _check_units(settings)
        config = settings.kv_cache_config
        self.geometry = CacheGeometry.from_config(config)
        check_room_for_one(
            self.geometry, config.num_blocks, settings.max_model_len, settings.num_lookahead_tokens
        )
        self.policy = settings.policy or resolve_policy(
            config, self.geometry, enable_caching=settings.enable_caching
        )
        self.index = PrefixIndex(
            config.num_blocks,
            [group.group_id for group in self.geometry.dense],
            [group.group_id for group in self.geometry.windows],
            KVEventWriter(settings.enable_kv_cache_events),
            ranks_blocks=self.policy.adapts,
        )
        self.pool = BlockPool(
            config.num_blocks,
            settings.enable_caching,
            settings.hash_block_size,
            metrics_collector=settings.metrics_collector,
            index=self.index,
        )
        self._pinned_share = self.policy.pinned_share
        if self._pinned_share is None:
            self._pinned_share = pinned_share(config)
        if self.policy.pinned_share is not None:
            self.require_pins()
        self.store = CheckpointStore(
            self.pool,
            self.index,
            supersedes=self.policy.supersedes,
            spares_live=self.policy.adapts,
        )
        self.adaptation: Adaptation | None = None
        if self.policy.adapts and settings.enable_caching:
            self.adaptation = Adaptation(self.geometry, config.num_blocks - 1)

    def require_pins(self) -> Pins:
        """Return the pool's pins, from now on in use."""
        pool = self.pool
        if pool.pins is None:
            max_pinned = int((pool.num_gpu_blocks - 1) * (self._pinned_share or 0.0))
            pool.enable_pinning(max_pinned, max_checkpoint_blocks(self.geometry))
        assert pool.pins is not None
        return pool.pins

    @property
    def interval(self) -> int:
        """Tokens between two checkpoints that prompts leave; 0: none."""
        return self.policy.interval if self.adaptation is None else self.adaptation.interval

    def observe(self, request: Request) -> None:
        """Learn from an admitted prompt."""
        if self.adaptation is not None:
            dense_share = self.index.dense_share(self.pool.num_spare_blocks)
            num_tokens = request.num_prompt_tokens
            self.adaptation.observe(request.block_hashes, num_tokens, dense_share)
            self._follow_rule(self.adaptation)

    def _follow_rule(self, adaptation: Adaptation) -> None:
        if self.pool.ranked is not None:
            self.pool.ranked.rule = adaptation.rule

    def reset(self) -> bool:
        """Forget everything cached and what was learnt of it; False while blocks are held."""
        done = self.pool.reset_prefix_cache()
        if done and self.adaptation is not None:
            self.adaptation.reset()
            self.store.forget_yields()
            self._follow_rule(self.adaptation)
        return done

    def policy_stats(self) -> CachePolicyStats | None:
        """Return what was learnt of the traffic; None where nothing is."""
        pool = self.pool
        if self.adaptation is None or pool.ranked is None:
            return None
        spare_share = pool.num_spare_blocks / max(1, pool.num_gpu_blocks - 1)
        return self.adaptation.stats(spare_share, pool.ranked.proven_share)


def _check_units(settings: CacheSettings) -> None:
    """Refuse sizes at which hits at one unit cannot be."""
    if settings.num_context_ranks != 1:
        raise ConfigError(
            f"Context parallelism over {settings.num_context_ranks} ranks is not supported "
            "with a hybrid cache that hits at one unit: set both context parallel sizes to 1."
        )
    unit = settings.kv_cache_config.hit_unit
    if settings.hash_block_size != unit:
        # Different numbers would write keys at one granularity and look them up at another.
        raise ConfigError(
            f"hash_block_size={settings.hash_block_size} and the hit unit {unit} "
            "must be the same number: leave hash_block_size out."
        )
