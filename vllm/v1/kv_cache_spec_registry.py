"""Which manager serves a KV-cache spec, and with which specs it may share a group.

The registry is filled at import-like moments only: by ``register_all_kvcache_specs`` (the
built-ins), by the platform's hook and by the ``register_kv_cache_spec`` decorator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_specs.records import (
    _REGISTRY_KVCACHESPEC_LIST,
    KVCacheSpecRecord,
    check_managed,
    find_record,
)

if TYPE_CHECKING:
    from vllm.v1.core.whole_block.manager_base import SingleTypeKVCacheManager

__all__ = [
    "_REGISTRY_KVCACHESPEC_LIST",
    "KVCacheSpecRecord",
    "KVCacheSpecRegistry",
    "register_kv_cache_spec",
]

_SpecClass = TypeVar("_SpecClass", bound="type[KVCacheSpec]")


class KVCacheSpecRegistry:
    """Class-level access to the registry; there is one per process."""

    @classmethod
    def register(
        cls,
        kvcache_spec_cls: type[KVCacheSpec],
        manager_class: type[SingleTypeKVCacheManager] | None = None,
        uniform_type_base_spec: type[KVCacheSpec] | None = None,
    ) -> None:
        """Register a spec class; the same registration twice is fine.

        Args:
            kvcache_spec_cls: The class to register.
            manager_class: Its manager, required.
            uniform_type_base_spec: A superclass (or the class itself, the default).

        Raises:
            AssertionError: No manager, a base that is no superclass, or a registration that
                contradicts an earlier one.
        """
        assert manager_class is not None, (
            f"manager_class is required to register {kvcache_spec_cls.__name__}."
        )
        base = kvcache_spec_cls if uniform_type_base_spec is None else uniform_type_base_spec
        assert issubclass(kvcache_spec_cls, base), (
            f"uniform_type_base_spec {base.__name__} must be a superclass of "
            f"{kvcache_spec_cls.__name__}."
        )
        record = KVCacheSpecRecord(kvcache_spec_cls, manager_class, base)
        known = _REGISTRY_KVCACHESPEC_LIST.setdefault(kvcache_spec_cls, record)
        assert known == record, (
            f"{kvcache_spec_cls.__name__} is already registered as {known}, which conflicts "
            f"with {record}."
        )

    @classmethod
    def get_manager_class(cls, spec: KVCacheSpec) -> type[SingleTypeKVCacheManager] | None:
        """Return the manager class of a spec, None if neither it nor a base is registered."""
        record = find_record(type(spec))
        return None if record is None else record.manager_class

    @classmethod
    def get_uniform_type_base_spec(cls, spec: KVCacheSpec) -> type[KVCacheSpec] | None:
        """Return the class that groups with this spec share, None if nothing is registered."""
        record = find_record(type(spec))
        return None if record is None else record.uniform_type_base_spec

    @classmethod
    def check_kv_cache_spec_registry(cls, kv_cache_specs: Mapping[str, KVCacheSpec]) -> None:
        """Refuse specs that nothing manages; see ``check_managed``."""
        check_managed(kv_cache_specs)


def register_kv_cache_spec(
    manager_class: type[SingleTypeKVCacheManager] | None = None,
    uniform_type_base_spec: type[KVCacheSpec] | None = None,
) -> Callable[[_SpecClass], _SpecClass]:
    """Class decorator form of ``KVCacheSpecRegistry.register``."""

    def decorate(spec_class: _SpecClass) -> _SpecClass:
        KVCacheSpecRegistry.register(spec_class, manager_class, uniform_type_base_spec)
        return spec_class

    return decorate
