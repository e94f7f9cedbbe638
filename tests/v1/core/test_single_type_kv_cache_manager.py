"""Registration of the built-in specs, and construction of managers."""

from typing import Any

import pytest

from tests.v1.core.specs import HALF, chunked, full, make_vllm_config, mamba, mla, swa, swa_mla
from tests.v1.core.whole_block.lookup_table import make_manager
from vllm import platforms
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

CROSS = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=HALF)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "manager_class"),
    [
        (full(), managers.FullAttentionManager),
        (mla(), managers.FullAttentionManager),
        (swa(), managers.SlidingWindowManager),
        (swa_mla(), managers.SlidingWindowManager),
        (chunked(), managers.ChunkedLocalAttentionManager),
        (mamba(), managers.MambaManager),
        (CROSS, managers.CrossAttentionManager),
    ],
)
def test_manager_of_a_spec(spec: KVCacheSpec, manager_class: type) -> None:
    manager, _ = make_manager(spec)
    assert type(manager) is manager_class


def test_bases_of_groups() -> None:
    base = KVCacheSpecRegistry.get_uniform_type_base_spec
    assert base(mla()) is base(full()) is type(full())
    assert base(swa()) is type(swa())
    assert base(swa_mla()) is type(swa_mla())


def test_admission_caps() -> None:
    def cap(spec: KVCacheSpec) -> int | None:
        manager = managers.get_manager_for_kv_cache_spec(
            spec,
            max_num_batched_tokens=1024,
            max_model_len=100_000,
            block_pool=make_manager(spec)[1],
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=16,
        )
        return manager.max_admission_blocks_per_request

    assert cap(swa(sliding_window=1024)) == 129
    assert cap(chunked(attention_chunk_size=1024)) == 128
    assert cap(full()) is None


def test_an_unknown_spec() -> None:
    spec = AttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=HALF)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AttentionSpec"):
        make_manager(spec)


def test_the_platform_adds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Platform:
        def register_custom_kv_cache_specs(self, vllm_config: Any) -> None:
            seen.append(vllm_config)

    monkeypatch.setattr(platforms, "current_platform", Platform(), raising=False)
    config = make_vllm_config()
    managers.register_all_kvcache_specs(config)
    managers.register_all_kvcache_specs(None)
    assert seen == [config]
