"""The manager of compressed groups: dense tables, whatever wraps their spec."""

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import KVCacheSpec, member_spec


class CompressAttentionManager(FullAttentionManager):
    """Block tables of C4 and C128 entries when hits are whole blocks (``hit_unit`` None).

    Every row of the context is needed, so this is the core's dense manager; a group of entries and
    index keys comes as ``UniformTypeKVCacheSpecs`` and is unpacked before a block size is read.
    With ``hit_unit`` set a request has a ``DenseTable`` per group instead.

    Owns: as ``SingleTypeKVCacheManager``.
    """

    def __init__(self, kv_cache_spec: KVCacheSpec, **kwargs: Any) -> None:
        super().__init__(member_spec(kv_cache_spec), **kwargs)
