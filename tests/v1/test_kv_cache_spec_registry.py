from dataclasses import dataclass

import pytest

from tests.v1.core.specs import chunked, full, mamba, mla, state, swa, swa_mla
from vllm.exceptions import ConfigError
from vllm.v1 import kv_cache_spec_registry
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CompressorStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec


@pytest.fixture(autouse=True)
def registry():
    """The registry is process-wide: give every test its own content."""
    entries = kv_cache_spec_registry._REGISTRY_KVCACHESPEC_LIST
    saved = entries.copy()
    yield entries
    entries.clear()
    entries.update(saved)


@dataclass(frozen=True, kw_only=True)
class CustomSpec(FullAttentionSpec):
    """A spec from outside."""


class CustomManager(FullAttentionManager):
    """A manager from outside."""


def custom() -> CustomSpec:
    return CustomSpec(**full().__dict__)


@pytest.mark.parametrize(
    ("spec", "manager", "base"),
    [
        (full(), FullAttentionManager, FullAttentionSpec),
        (mla(), FullAttentionManager, FullAttentionSpec),
        (swa(), SlidingWindowManager, SlidingWindowSpec),
        (swa_mla(), SlidingWindowManager, SlidingWindowMLASpec),
        (state(), SlidingWindowManager, CompressorStateSpec),
        (chunked(), ChunkedLocalAttentionManager, ChunkedLocalAttentionSpec),
        (mamba(), MambaManager, MambaSpec),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_built_ins_register_when_the_registry_is_empty(registry, spec, manager, base):
    registry.clear()
    assert KVCacheSpecRegistry.get_manager_class(spec) is manager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is base
    assert registry  # and stay


def test_unregistered_subclass_uses_its_base(registry):
    assert KVCacheSpecRegistry.get_manager_class(custom()) is FullAttentionManager


def test_decorator_wins_over_the_base(registry):
    KVCacheSpecRegistry.get_manager_class(full())
    decorated = register_kv_cache_spec(CustomManager, FullAttentionSpec)(CustomSpec)
    assert decorated is CustomSpec
    record = registry[CustomSpec]
    assert record.kvcache_spec_cls is CustomSpec
    assert record.manager_class is CustomManager
    assert record.uniform_type_base_spec is FullAttentionSpec
    assert KVCacheSpecRegistry.get_manager_class(custom()) is CustomManager
    assert KVCacheSpecRegistry.get_manager_class(full()) is FullAttentionManager


def test_base_defaults_to_the_class(registry):
    KVCacheSpecRegistry.register(CustomSpec, manager_class=CustomManager)
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(custom()) is CustomSpec


def test_manager_is_required():
    with pytest.raises(AssertionError, match="manager_class is required"):
        KVCacheSpecRegistry.register(CustomSpec)


def test_base_must_be_a_superclass():
    with pytest.raises(AssertionError, match="superclass"):
        KVCacheSpecRegistry.register(CustomSpec, CustomManager, SlidingWindowSpec)


def test_registering_twice(registry):
    KVCacheSpecRegistry.register(CustomSpec, CustomManager)
    KVCacheSpecRegistry.register(CustomSpec, CustomManager, CustomSpec)
    with pytest.raises(AssertionError, match="conflicts"):
        KVCacheSpecRegistry.register(CustomSpec, FullAttentionManager)
    with pytest.raises(AssertionError, match="conflicts"):
        KVCacheSpecRegistry.register(CustomSpec, CustomManager, FullAttentionSpec)
    assert registry[CustomSpec].manager_class is CustomManager


def test_check_names_the_layer():
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.check_kv_cache_spec_registry({"a": full(), "b": swa()})
    with pytest.raises(ValueError, match="Unsupported KV cache spec type for layer b:") as error:
        KVCacheSpecRegistry.check_kv_cache_spec_registry({"a": full(), "b": KVCacheSpec(16)})
    assert isinstance(error.value, ConfigError)


def test_unknown_spec_has_nothing():
    assert KVCacheSpecRegistry.get_manager_class(KVCacheSpec(16)) is None
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(KVCacheSpec(16)) is None


def test_custom_specs_group_with_their_base():
    register_kv_cache_spec(CustomManager, FullAttentionSpec)(CustomSpec)
    assert custom().is_uniform_with_collection({"a": custom(), "b": full()})
