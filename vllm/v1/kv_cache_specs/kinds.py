"""The kind and the window of a spec, as KV events name them."""

from __future__ import annotations

from vllm.v1.kv_cache_specs.base import KVCacheSpec, KVCacheSpecKind


def get_kv_cache_spec_kind(spec: KVCacheSpec) -> KVCacheSpecKind:
    """Return the kind of a spec; UNKNOWN for groups of several kinds."""
    kinds = {member.kind for member in spec.members()}
    return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN


def get_kv_cache_spec_sliding_window(spec: KVCacheSpec) -> int | None:
    """Return the window of a sliding-window spec (the common one of a uniform group) or None."""
    return spec.window_tokens
