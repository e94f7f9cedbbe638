"""Which coordinator serves a KV-cache configuration.

A registry of name -> (when it applies, how to build it). Later registrations are asked first, so
that a platform's own coordinator wins over the built-in ones where it applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Takes the keyword arguments of ``get_kv_cache_coordinator`` and returns the coordinator.
CoordinatorFactory = Callable[..., Any]
# (kv_cache_config, enable_caching) -> whether the coordinator applies.
CoordinatorPredicate = Callable[["KVCacheConfig", bool], bool]


@dataclass(frozen=True, slots=True)
class CoordinatorEntry:
    """One registration.

    Attributes:
        name: For messages and tests.
        applies: Whether it serves a configuration.
        factory: Builds it.
    """

    name: str
    applies: CoordinatorPredicate
    factory: CoordinatorFactory


_COORDINATORS: dict[str, CoordinatorEntry] = {}


def register_coordinator(
    name: str, factory: CoordinatorFactory, applies: CoordinatorPredicate
) -> None:
    """Register a coordinator; an equal registration twice is fine.

    Raises:
        ConfigError: The name is taken by another factory.
    """
    known = _COORDINATORS.get(name)
    if known is not None and known.factory != factory:
        raise ConfigError(
            f"A KV cache coordinator named {name!r} is registered already: choose another name."
        )
    _COORDINATORS.setdefault(name, CoordinatorEntry(name, applies, factory))


def find_coordinator(kv_cache_config: KVCacheConfig, enable_caching: bool) -> CoordinatorEntry:
    """Return the latest registration that applies to a configuration.

    Raises:
        ConfigError: None applies.
    """
    for entry in reversed(_COORDINATORS.values()):
        if entry.applies(kv_cache_config, enable_caching):
            return entry
    raise ConfigError(
        f"No KV cache coordinator serves {len(kv_cache_config.kv_cache_groups)} groups; "
        f"registered: {', '.join(_COORDINATORS) or 'none'}."
    )
