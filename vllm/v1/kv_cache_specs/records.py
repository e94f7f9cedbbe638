"""Which manager serves a spec and which specs share a group with it: the bare records.

They lie below the specs, which ask whether they may share a group. ``KVCacheSpecRegistry`` is the
way to read and fill them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.exceptions import ConfigError

# Its register_all_kvcache_specs fills an empty table; by name, because it lies far above.
_BUILT_INS = "vllm.v1.core.whole_block.registration"


@dataclass(frozen=True)
class KVCacheSpecRecord:
    """One registration.

    Attributes:
        kvcache_spec_cls: The registered spec class.
        manager_class: The single-type manager that serves it.
        uniform_type_base_spec: Layers whose specs are all instances of this class may form one
            group (``KVCacheSpec.is_uniform_with_collection``).
    """

    kvcache_spec_cls: type[Any]
    manager_class: type[Any]
    uniform_type_base_spec: type[Any]


_REGISTRY_KVCACHESPEC_LIST: dict[type[Any], KVCacheSpecRecord] = {}


def find_record(spec_class: type[Any]) -> KVCacheSpecRecord | None:
    """Return the record of the nearest registered class in the MRO; None without one."""
    if not _REGISTRY_KVCACHESPEC_LIST:
        import_module(_BUILT_INS).register_all_kvcache_specs(None)
    for base in spec_class.__mro__:
        record = _REGISTRY_KVCACHESPEC_LIST.get(base)
        if record is not None:
            return record
    return None


def check_managed(kv_cache_specs: Mapping[str, Any]) -> None:
    """Refuse specs that nothing manages.

    Hits at one unit need no manager: there a kind's own ``geometry`` is enough.

    Args:
        kv_cache_specs: Spec by layer name.

    Raises:
        ConfigError: (a ValueError) Names the first such layer and its spec type.
    """
    for layer_name, spec in kv_cache_specs.items():
        is_managed = spec.keeps_every_token or spec.has_checkpoints
        if not is_managed and find_record(type(spec)) is None:
            raise ConfigError(
                f"Unsupported KV cache spec type for layer {layer_name}: "
                f"{type(spec).__name__}. Register it with register_kv_cache_spec."
            )
