"""Specs and a configuration for tests that need no torch."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CompressorStateSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True)
class FakeDtype:
    """The one thing a spec asks of a dtype."""

    itemsize: int


HALF = FakeDtype(2)
FLOAT = FakeDtype(4)


def _kw(kw: dict[str, Any]) -> dict[str, Any]:
    return {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": HALF, **kw}


def full(**kw: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**_kw(kw))


def swa(**kw: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_kw({"sliding_window": 128, **kw}))


def chunked(**kw: Any) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**_kw({"attention_chunk_size": 64, **kw}))


def mla(**kw: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(**_kw({"num_kv_heads": 1, "head_size": 576, **kw}))


def swa_mla(**kw: Any) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        **_kw({"num_kv_heads": 1, "head_size": 576, "sliding_window": 128, **kw})
    )


def state(**kw: Any) -> CompressorStateSpec:
    return CompressorStateSpec(
        **{
            "block_size": 2,
            "num_kv_heads": 1,
            "head_size": 100,
            "dtype": FLOAT,
            "sliding_window": 8,
            "state_ratio": 4,
            "state_overlap": True,
            **kw,
        }
    )


def mamba(**kw: Any) -> MambaSpec:
    return MambaSpec(
        **{"block_size": 16, "shapes": ((2, 512), (3, 8)), "dtypes": (FLOAT, HALF), **kw}
    )


def make_vllm_config(
    max_model_len: int = 1024,
    original_max_model_len: int | None = None,
    max_num_batched_tokens: int = 256,
    dcp: int = 1,
    **cache: Any,
) -> VllmConfig:
    """Return a configuration whose model is only a length."""
    model: Any = SimpleNamespace(
        max_model_len=max_model_len, original_max_model_len=original_max_model_len
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(**cache),
        parallel_config=ParallelConfig(decode_context_parallel_size=dcp),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=1,
        ),
    )
