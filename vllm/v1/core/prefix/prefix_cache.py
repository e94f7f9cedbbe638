"""What is cached with hits at one unit, and the rules by which it is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.pool.events import KVEventWriter
from vllm.v1.core.pool.pins import Pins
from vllm.v1.core.pool.regular_tier import RegularTier
from vllm.v1.core.prefix.checkpoint_store import CheckpointStore
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.retention.pinning import PinSettings, log_pins, pinned_share, resolve_pins
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.core.retention.sizes import (
    check_room_for_one,
    max_checkpoint_blocks,
    max_request_blocks,
)
from vllm.v1.core.shared_pool import SharedPool

if TYPE_CHECKING:
    from vllm.v1.core.values.cache_settings import CacheSettings
    from vllm.v1.metrics.stats import CachePolicyStats
    from vllm.v1.request import Request


class PrefixCache:
    """The pool with its index and its checkpoints, and what is known of the model and the traffic.

    Those who plan steps, publish prefixes and let requests wait share it.

    Owns: the parts below.

    Attributes:
        geometry: The model's groups.
        policy: Which checkpoints are kept, and which go first.
        pinning: What long steps pin; None: nothing.
        index: Keys and checkpoints by prefix.
        pool: The blocks.
        store: The checkpoints' one writer.

    Args:
        settings: Groups, sizes and switches; ``hit_unit`` is set.

    Raises:
        ConfigError: Block sizes, the pool or the retention interval do not fit the model.
    """

    def __init__(self, settings: CacheSettings) -> None:
        _check_units(settings)
        config = settings.kv_cache_config
        geometry = CacheGeometry.from_config(config)
        check_room_for_one(
            geometry, config.num_blocks, settings.max_model_len, settings.num_lookahead_tokens
        )
        self._is_on = settings.enable_caching
        if not settings.allows_lazy:
            geometry = geometry.without_lazy_layers()
        self.policy, self.pinning = _choose(settings, geometry)
        # Rows that were left out are rebuilt where they are wanted, which a policy must be for.
        if self.policy.rebuild_tokens is None:
            geometry = geometry.without_lazy_layers()
        self.geometry = geometry
        self.index = PrefixIndex(
            config.num_blocks,
            [group.group_id for group in self.geometry.dense],
            [group.group_id for group in self.geometry.windows],
            KVEventWriter(settings.enable_kv_cache_events),
            ranks_blocks=self.policy.choose_victim is not None,
        )
        make_ranked = None
        if self.policy.choose_victim is not None:
            make_ranked = partial(
                RegularTier, config.num_blocks, self.index, self.policy.choose_victim
            )
        self.pool = _make_pool(settings, self.geometry, self.index, make_ranked)
        self._pinned_share = self.pinning.share if self.pinning else pinned_share(config)
        if self.pinning is not None:
            self.require_pins()
            per_token = sum(1 / group.block_size for group in self.geometry.dense)
            num_tokens = int((config.num_blocks - 1) / per_token) if per_token else 0
            window_blocks = max_checkpoint_blocks(self.geometry)
            log_pins(self.pinning, config.num_blocks - 1, window_blocks, num_tokens)
        self.store = CheckpointStore(self.pool, self.index, self.policy)

    def require_pins(self) -> Pins:
        """Return the pool's pins, from now on in use."""
        pool = self.pool
        if pool.pins is None:
            max_pinned = int((pool.num_gpu_blocks - 1) * self._pinned_share)
            pool.enable_pinning(max_pinned)
        assert pool.pins is not None
        return pool.pins

    def observe(self, request: Request) -> None:
        """Let the policy learn from an admitted prompt."""
        if self._is_on:
            dense_share = self.index.dense_share(self.pool.num_spare_blocks)
            num_tokens = request.num_prompt_tokens
            self.policy.observe(request.block_hashes, num_tokens, dense_share)

    def reset(self) -> bool:
        """Forget everything cached and what was learnt of it; False while blocks are held."""
        done = self.pool.reset_prefix_cache()
        if done:
            self.policy.reset()
        return done

    def policy_stats(self) -> CachePolicyStats | None:
        """Return what was learnt of the traffic; None where nothing is."""
        if not self._is_on:
            return None
        pool = self.pool
        spare_share = pool.num_spare_blocks / max(1, pool.num_gpu_blocks - 1)
        return self.policy.stats(spare_share, pool.proven_share)


def _make_pool(
    settings: CacheSettings,
    geometry: CacheGeometry,
    index: PrefixIndex,
    make_ranked: Callable[[], RegularTier] | None,
) -> TieredPool:
    """Return the pool: with partitions, if tenants have shares of it.

    Raises:
        ConfigError: What is guaranteed leaves no room for the longest request.
    """
    num_blocks, shares = settings.kv_cache_config.num_blocks, settings.shares
    if shares is None:
        ranked = None if make_ranked is None else make_ranked()
        return TieredPool(
            num_blocks, settings.enable_caching, index, ranked, settings.metrics_collector
        )
    needed = max_request_blocks(geometry, settings.max_model_len, settings.num_lookahead_tokens)
    room = num_blocks - 1 - sum(shares.guaranteed)
    if room < needed:
        raise ConfigError(
            f"Tenants are guaranteed {sum(shares.guaranteed)} of {num_blocks - 1} blocks of the "
            f"KV cache, which leaves {room}, and one request of max seq len "
            f"{settings.max_model_len} needs {needed}: lower cache_guaranteed or --max-model-len, "
            "or give more memory."
        )
    return SharedPool(
        num_blocks, settings.enable_caching, index, make_ranked, settings.metrics_collector, shares
    )


def _choose(
    settings: CacheSettings, geometry: CacheGeometry
) -> tuple[RetentionPolicy, PinSettings | None]:
    """Return the policy and the pins that are given, else those that the operator asks for."""
    if settings.policy is not None:
        return settings.policy, settings.pinning
    config = settings.kv_cache_config
    policy = make_policy(settings.retention, geometry, config.num_blocks - 1)
    pinning = settings.pinning
    if pinning is None and settings.enable_caching and geometry.windows:
        pinning = resolve_pins(config)
    return policy, pinning


def _check_units(settings: CacheSettings) -> None:
    """Refuse sizes at which hits at one unit cannot be."""
    if settings.num_context_ranks != 1:
        raise ConfigError(
            f"Context parallelism over {settings.num_context_ranks} ranks is not supported "
            "with a prefix cache that hits at one unit: set both context parallel sizes to 1."
        )
    unit = settings.kv_cache_config.hit_unit
    if settings.hash_block_size != unit:
        # Different numbers would write keys at one granularity and look them up at another.
        raise ConfigError(
            f"hash_block_size={settings.hash_block_size} and the hit unit {unit} "
            "must be the same number: leave hash_block_size out."
        )
