"""The kind and the window of a spec, as KV events name them."""

from __future__ import annotations

from enum import StrEnum

from vllm.v1.kv_cache_specs.base import KVCacheSpec
from vllm.v1.kv_cache_specs.encoder import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.kv_cache_specs.full import FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec
from vllm.v1.kv_cache_specs.mamba import MambaSpec
from vllm.v1.kv_cache_specs.uniform import member_specs
from vllm.v1.kv_cache_specs.window import (
    ChunkedLocalAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


class KVCacheSpecKind(StrEnum):
    """The kind of a spec, as KV events name it."""

    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    MAMBA = "mamba"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    SINK_FULL_ATTENTION = "sink_full_attention"
    ENCODER_ONLY_ATTENTION = "encoder_only_attention"
    CROSS_ATTENTION = "cross_attention"
    UNKNOWN = "unknown"


_KIND_BY_SPEC: dict[type[KVCacheSpec], KVCacheSpecKind] = {
    SinkFullAttentionSpec: KVCacheSpecKind.SINK_FULL_ATTENTION,
    MLAAttentionSpec: KVCacheSpecKind.MLA_ATTENTION,
    FullAttentionSpec: KVCacheSpecKind.FULL_ATTENTION,
    SlidingWindowMLASpec: KVCacheSpecKind.SLIDING_WINDOW_MLA,
    SlidingWindowSpec: KVCacheSpecKind.SLIDING_WINDOW,
    MambaSpec: KVCacheSpecKind.MAMBA,
    ChunkedLocalAttentionSpec: KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
    EncoderOnlyAttentionSpec: KVCacheSpecKind.ENCODER_ONLY_ATTENTION,
    CrossAttentionSpec: KVCacheSpecKind.CROSS_ATTENTION,
}


def get_kv_cache_spec_kind(spec: KVCacheSpec) -> KVCacheSpecKind:
    """Return the kind of a spec by its most specific known class; UNKNOWN for mixed groups."""
    kinds = {_kind_of_class(type(member)) for member in member_specs(spec)}
    return kinds.pop() if len(kinds) == 1 else KVCacheSpecKind.UNKNOWN


def _kind_of_class(spec_class: type[KVCacheSpec]) -> KVCacheSpecKind:
    for base in spec_class.__mro__:
        kind = _KIND_BY_SPEC.get(base)
        if kind is not None:
            return kind
    return KVCacheSpecKind.UNKNOWN


def get_kv_cache_spec_sliding_window(spec: KVCacheSpec) -> int | None:
    """Return the window of a sliding-window spec (the common one of a uniform group) or None."""
    windows = {
        member.sliding_window if isinstance(member, SlidingWindowSpec) else None
        for member in member_specs(spec)
    }
    return windows.pop() if len(windows) == 1 else None
