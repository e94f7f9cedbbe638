"""Which manager serves which spec, and building it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError
from vllm.v1.core.whole_block.interface_only import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    MambaManager,
)
from vllm.v1.core.whole_block.manager_base import SingleTypeKVCacheManager
from vllm.v1.core.whole_block.managers import (
    FullAttentionManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CompressorStateSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# (spec, its manager, the spec whose subclasses may share a group with it)
_BUILT_IN: tuple[
    tuple[type[KVCacheSpec], type[SingleTypeKVCacheManager], type[KVCacheSpec]], ...
] = (
    (FullAttentionSpec, FullAttentionManager, FullAttentionSpec),
    (TQFullAttentionSpec, FullAttentionManager, FullAttentionSpec),
    (MLAAttentionSpec, FullAttentionManager, FullAttentionSpec),
    (HiddenStateCacheSpec, FullAttentionManager, FullAttentionSpec),
    (SinkFullAttentionSpec, SinkFullAttentionManager, FullAttentionSpec),
    (SlidingWindowSpec, SlidingWindowManager, SlidingWindowSpec),
    (SlidingWindowMLASpec, SlidingWindowManager, SlidingWindowMLASpec),
    (CompressorStateSpec, SlidingWindowManager, CompressorStateSpec),
    (ChunkedLocalAttentionSpec, ChunkedLocalAttentionManager, ChunkedLocalAttentionSpec),
    (MambaSpec, MambaManager, MambaSpec),
    (CrossAttentionSpec, CrossAttentionManager, CrossAttentionSpec),
)


def register_all_kvcache_specs(vllm_config: VllmConfig | None) -> None:
    """Register the built-in specs, then those of the current platform.

    Args:
        vllm_config: Handed to the platform; None registers the built-ins only.
    """
    for spec_class, manager_class, base in _BUILT_IN:
        KVCacheSpecRegistry.register(spec_class, manager_class, base)
    if vllm_config is not None:
        # Finding the platform may load torch, which v1/core does without.
        from vllm.platforms import current_platform  # noqa: PLC0415

        current_platform.register_custom_kv_cache_specs(vllm_config)


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    max_num_batched_tokens: int,
    max_model_len: int,
    **kwargs: Any,
) -> SingleTypeKVCacheManager:
    """Build the manager registered for a spec.

    Args:
        kv_cache_spec: The group's spec.
        max_num_batched_tokens: Tokens of a step; bounds what a window group holds at once.
        max_model_len: Tokens of a request.
        **kwargs: The manager's other constructor arguments.

    Raises:
        ConfigError: Nothing is registered for the spec.
    """
    manager_class = KVCacheSpecRegistry.get_manager_class(kv_cache_spec)
    if manager_class is None:
        raise ConfigError(
            f"Unsupported KV cache spec type {type(kv_cache_spec).__name__}: register it with "
            "register_kv_cache_spec."
        )
    # A block has as many times its tokens as ranks share it.
    num_ranks = kwargs.get("dcp_world_size", 1) * kwargs.get("pcp_world_size", 1)
    spec = kv_cache_spec
    if num_ranks > 1:
        spec = kv_cache_spec.copy_with_new_block_size(kv_cache_spec.block_size * num_ranks)
    bound = spec.max_admission_blocks_per_request(max_num_batched_tokens, max_model_len)
    if bound is not None:
        kwargs["max_admission_blocks_per_request"] = bound
    return manager_class(kv_cache_spec, **kwargs)
