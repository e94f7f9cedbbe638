"""Specs, the registry, managers and coordinators, sentence by sentence (sections 5 to 7)."""

import dataclasses
from typing import Any

import pytest

from tests.v1.core.cache_helpers import make_config, make_manager, make_request
from tests.v1.core.specs import HALF, chunked, full, make_vllm_config, mamba, mla, swa, swa_mla
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    _project_kv_cache_groups_to_worker,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    init_none_hash,
    is_kv_cache_spec_uniform,
    make_block_hash_with_group_id,
    resolve_kv_cache_block_sizes,
    unify_hybrid_kv_cache_specs,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
    get_manager_for_kv_cache_spec,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def cross() -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=HALF)  # type: ignore[arg-type]


# ---- 5.1 specs -----------------------------------------------------------------------------------

PAGE = 16 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (full(), 2 * PAGE),
        (full(head_size_v=32), PAGE + PAGE // 2),
        (full(page_size_padded=9999), 9999),
        (swa(), 2 * PAGE),
        (mla(), 16 * 576 * 2),
        (mla(compress_ratio=4), 4 * 576 * 2),
        (mla(cache_dtype_str="fp8_ds_mla"), 16 * 656),
        (mla(cache_dtype_str="fp8_ds_mla", model_version="deepseek_v4"), 16 * 584),
        (mamba(shapes=((2, 512), (3, 8))), 2 * 512 * 4 + 3 * 8 * 2),
        (UniformTypeKVCacheSpecs(16, {"a": full(), "b": full(head_size=128)}), 6 * PAGE),
    ],
)
def test_pages(spec: KVCacheSpec, num_bytes: int) -> None:
    assert spec.page_size_bytes == num_bytes


def test_a_page_is_never_padded_to_less() -> None:
    with pytest.raises(AssertionError):
        _ = full(page_size_padded=1).page_size_bytes


@pytest.mark.parametrize(("spec", "stored"), [(full(), 16), (mla(compress_ratio=4), 4)])
def test_stored_rows(spec: KVCacheSpec, stored: int) -> None:
    assert spec.storage_block_size == stored
    assert spec.copy_with_new_block_size(32).block_size == 32


@pytest.mark.parametrize(
    ("spec", "num_pages"),
    [
        (full(), 64),  # ceil(1024 / 16)
        (swa(sliding_window=64), 21),  # ceil((63 + 256) / 16) + 1
        (chunked(attention_chunk_size=64), 20),  # ceil((64 + 256) / 16)
        (mamba(), 1),
        (mamba(num_speculative_blocks=2), 3),
    ],
)
def test_memory_of_one_request(spec: KVCacheSpec, num_pages: int) -> None:
    needed = spec.max_memory_usage_bytes(make_vllm_config())
    assert needed == num_pages * spec.page_size_bytes


@pytest.mark.parametrize(
    ("window", "batched", "blocks"), [(1024, 1024, 129), (64, 128, 13), (64, 4096, 64 + 1)]
)
def test_most_blocks_of_a_window(window: int, batched: int, blocks: int) -> None:
    spec = swa(sliding_window=window)
    limit = 1024 if batched == 4096 else 100_000
    assert spec.max_admission_blocks_per_request(batched, limit) == blocks


def test_merging_windows_of_full_attention() -> None:
    assert FullAttentionSpec.merge([full(), full(sliding_window=64)]).sliding_window == 64
    with pytest.raises(ValueError, match="window"):
        FullAttentionSpec.merge([full(sliding_window=32), full(sliding_window=64)])
    for other in (full(head_size=32), mla()):
        with pytest.raises(AssertionError):
            FullAttentionSpec.merge([full(), other])


@pytest.mark.parametrize("field", [{"cache_dtype_str": "fp8"}, {"compress_ratio": 4}])
def test_merging_compressed_rows(field: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        MLAAttentionSpec.merge([mla(), mla(**field)])
    copied = MLAAttentionSpec.merge([mla(), mla()])
    assert copied == mla()


@pytest.mark.parametrize(
    ("spec", "other", "is_uniform"),
    [
        (swa(), swa(head_size=128), True),
        (swa(), swa(sliding_window=64), False),
        (swa_mla(), swa_mla(head_size=64), True),
        (swa_mla(), swa(), False),
        (chunked(), chunked(attention_chunk_size=32), False),
        (mamba(), mamba(num_speculative_blocks=1), False),
        (full(), mla(), True),
    ],
)
def test_uniform_kinds(spec: KVCacheSpec, other: KVCacheSpec, is_uniform: bool) -> None:
    assert spec.is_uniform_with_collection({"a": spec, "b": other}) is is_uniform


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (full(), "full_attention", None),
        (full(sliding_window=64), "full_attention", None),
        (mla(), "mla_attention", None),
        (swa(), "sliding_window", 128),
        (swa_mla(), "sliding_window_mla", 128),
        (mamba(), "mamba", None),
        (chunked(), "chunked_local_attention", None),
        (cross(), "cross_attention", None),
        (UniformTypeKVCacheSpecs(16, {"a": swa(), "b": swa(head_size=128)}), "sliding_window", 128),
        (UniformTypeKVCacheSpecs(16, {"a": swa(), "b": full()}), "unknown", None),
    ],
)
def test_kinds(spec: KVCacheSpec, kind: str, window: int | None) -> None:
    assert get_kv_cache_spec_kind(spec).value == kind
    assert get_kv_cache_spec_sliding_window(spec) == window


# ---- 5.2 the registry ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "manager", "base"),
    [
        (FullAttentionSpec, FullAttentionManager, FullAttentionSpec),
        (TQFullAttentionSpec, FullAttentionManager, FullAttentionSpec),
        (MLAAttentionSpec, FullAttentionManager, FullAttentionSpec),
        (HiddenStateCacheSpec, FullAttentionManager, FullAttentionSpec),
        (SinkFullAttentionSpec, SinkFullAttentionManager, FullAttentionSpec),
        (type(swa()), SlidingWindowManager, type(swa())),
        (type(swa_mla()), SlidingWindowManager, type(swa_mla())),
        (type(chunked()), ChunkedLocalAttentionManager, type(chunked())),
        (type(mamba()), MambaManager, type(mamba())),
        (CrossAttentionSpec, CrossAttentionManager, CrossAttentionSpec),
    ],
)
def test_built_in_kinds(kind: type[KVCacheSpec], manager: type, base: type) -> None:
    spec = object.__new__(kind)
    assert KVCacheSpecRegistry.get_manager_class(spec) is manager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(spec) is base


def test_kinds_that_nobody_registered() -> None:
    @dataclasses.dataclass(frozen=True)
    class Unknown(KVCacheSpec):
        pass

    with pytest.raises(ValueError, match="Unsupported KV cache spec type for layer x"):
        KVCacheSpecRegistry.check_kv_cache_spec_registry({"x": Unknown(16)})
    with pytest.raises(AssertionError, match="manager_class is required"):
        KVCacheSpecRegistry.register(Unknown)
    with pytest.raises(AssertionError, match="Unsupported KV cache spec type"):
        Unknown(16).is_uniform_with_collection({"x": Unknown(16)})


# ---- 5.3 the config builder ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_full", "num_windows", "widths"),
    [(3, 7, [3, 3, 2, 2]), (6, 5, [6, 5]), (4, 4, [4, 4]), (2, 0, [2])],
)
def test_groups(num_full: int, num_windows: int, widths: list[int]) -> None:
    specs: dict[str, KVCacheSpec] = {f"f{i}": full() for i in range(num_full)}
    specs |= {f"w{i}": swa() for i in range(num_windows)}
    (config,) = get_kv_cache_configs(make_vllm_config(), [specs], [2**30])
    assert sorted((len(g.layer_names) for g in config.kv_cache_groups), reverse=True) == widths
    assert len(config.kv_cache_tensors) == max(widths)
    assert config.num_blocks == 2**30 // full().page_size_bytes // max(widths)


def test_pages_of_unlike_size_get_larger_blocks() -> None:
    specs = {"a": full(head_size=128), "b": swa()}
    (config,) = get_kv_cache_configs(make_vllm_config(), [specs], [2**30])
    sizes = {g.layer_names[0]: g.kv_cache_spec.block_size for g in config.kv_cache_groups}
    assert sizes == {"a": 16, "b": 32}
    with pytest.raises(NotImplementedError):
        get_kv_cache_configs(
            make_vllm_config(), [{"a": full(head_size=96), "b": swa(head_size=64)}], [2**30]
        )


def test_workers_have_the_blocks_of_the_smallest() -> None:
    specs = [{"a": full()}, {"b": full()}]
    configs = get_kv_cache_configs(make_vllm_config(), specs, [2**30, 2**29])
    assert {config.num_blocks for config in configs} == {2**29 // full().page_size_bytes}
    assert all(t.size <= 2**29 for config in configs for t in config.kv_cache_tensors)


def test_memory_that_is_too_little() -> None:
    for memory, text in ((0, "memory"), (1000, "max seq len")):
        with pytest.raises(ValueError, match=text):
            get_kv_cache_configs(make_vllm_config(), [{"a": full()}], [memory])


def test_without_attention() -> None:
    (config,) = get_kv_cache_configs(make_vllm_config(), [{}], [0])
    assert (config.num_blocks, config.kv_cache_tensors, config.kv_cache_groups) == (1, [], [])


def test_a_length_to_be_found_shrinks_and_never_grows() -> None:
    config = make_vllm_config(max_model_len=4096, original_max_model_len=-1)
    get_kv_cache_configs(config, [{"a": full()}], [100 * full().page_size_bytes])
    assert config.model_config.max_model_len == 1600
    get_kv_cache_configs(config, [{"a": full()}], [2**30])
    assert config.model_config.max_model_len == 1600


def test_what_a_worker_keeps_of_the_groups() -> None:
    spec = UniformTypeKVCacheSpecs(16, {"a": full(), "b": full(head_size=128)})
    groups = make_config(9, [spec, swa()], eagle_groups=(1,)).kv_cache_groups
    groups[0].layer_names[:] = ["a", "b"]
    first, second = _project_kv_cache_groups_to_worker(groups, {"b": full(head_size=128)})
    assert (first.layer_names, second.layer_names) == (["b"], [])
    assert isinstance(first.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert set(first.kv_cache_spec.kv_cache_specs) == {"b"}
    assert second.kv_cache_spec is groups[1].kv_cache_spec
    assert not second.is_eagle_group
    config = dataclasses.replace(make_config(9, []), kv_cache_groups=groups)
    merged = generate_scheduler_kv_cache_config([config])
    assert merged.kv_cache_groups[0].kv_cache_spec == full()
    assert config.kv_cache_groups[0].kv_cache_spec is spec


@pytest.mark.parametrize(
    ("specs", "is_uniform"),
    [({}, True), ({"a": full(), "b": full()}, True), ({"a": full(), "b": swa()}, False)],
)
def test_uniform_models(specs: dict[str, KVCacheSpec], is_uniform: bool) -> None:
    assert is_kv_cache_spec_uniform(specs) is is_uniform


def test_windows_as_full_attention() -> None:
    specs: dict[str, KVCacheSpec] = {"a": full(), "b": swa(), "c": chunked()}
    unify_hybrid_kv_cache_specs(specs)
    b, c = specs["b"], specs["c"]
    assert isinstance(b, FullAttentionSpec)
    assert isinstance(c, FullAttentionSpec)
    assert (b.sliding_window, c.attention_chunk_size) == (128, 64)
    with pytest.raises(ValueError):  # noqa: PT011 - the text is not part of the interface
        unify_hybrid_kv_cache_specs({"a": swa(), "b": chunked()})


def test_block_sizes() -> None:
    config = make_vllm_config()
    one = make_config(9, [full(block_size=32)])
    assert resolve_kv_cache_block_sizes(one, config) == (32, 32)
    several = make_config(9, [full(block_size=48), swa(block_size=32)])
    assert resolve_kv_cache_block_sizes(several, config) == (96, 16)
    config.cache_config.enable_prefix_caching = False
    assert resolve_kv_cache_block_sizes(several, config) == (96, 96)


# ---- 6 managers ----------------------------------------------------------------------------------


def manager_of(spec: KVCacheSpec, num_blocks: int = 40) -> Any:
    pool = BlockPool(num_blocks, True, spec.block_size)
    return get_manager_for_kv_cache_spec(
        spec,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=spec.block_size,
    )


@pytest.mark.parametrize(
    ("spec", "skipped"),
    [
        (swa(block_size=2, sliding_window=4), {3: 0, 4: 1, 5: 2, 11: 8}),
        (chunked(block_size=2, attention_chunk_size=4), {3: 0, 4: 4, 6: 4, 12: 12}),
        (mamba(block_size=2), {0: 0, 5: 4}),
        (full(block_size=2), {9: 0}),
    ],
)
def test_tokens_that_are_not_needed_any_more(spec: KVCacheSpec, skipped: dict[int, int]) -> None:
    manager = manager_of(spec)
    assert {n: max(0, manager.get_num_skipped_tokens(n)) for n in skipped} == skipped


@pytest.mark.parametrize(
    ("spec", "freed"),
    [
        (swa(block_size=2, sliding_window=4), {4: 0, 5: 1, 6: 1, 7: 2, 11: 4}),
        (chunked(block_size=2, attention_chunk_size=4), {0: 0, 4: 2, 6: 2, 12: 6}),
    ],
)
def test_skipped_blocks_become_null_in_place(spec: KVCacheSpec, freed: dict[int, int]) -> None:
    manager = manager_of(spec)
    null = manager.block_pool.null_block
    manager.req_to_blocks["r"] = blocks = [KVCacheBlock(1000 + i) for i in range(10)]
    for num_tokens, count in freed.items():
        manager.remove_skipped_blocks("r", num_tokens)
        assert [block is null for block in blocks] == [i < count for i in range(10)]


@pytest.mark.parametrize(("nulls", "free", "needed"), [(0, 10, 20), (5, 5, 15), (0, 0, 10)])
def test_blocks_to_allocate_count_hits_that_might_be_evicted(
    nulls: int, free: int, needed: int
) -> None:
    manager = manager_of(swa(block_size=2, sliding_window=4096))
    null = manager.block_pool.null_block
    hits = [null] * nulls + [KVCacheBlock(100 + i) for i in range(10 - nulls)]
    for block in hits[len(hits) - (10 - nulls - free) :] if free < 10 - nulls else ():
        block.ref_cnt = 1
    assert manager.get_num_blocks_to_allocate("r", 40, hits, 0, 40) == needed


T, F = True, False


@pytest.mark.parametrize(
    ("spec", "cached", "length"),
    [
        (swa(block_size=2, sliding_window=4), [T, T, F, T, F, F, T, T, F, T, T, T], 12),
        (swa(block_size=2, sliding_window=4), [T, T, F, T, F, F, T, T, F, F, F], 8),
        (swa(block_size=2, sliding_window=4), [T, T, F, T, F, F, T, T, F, F, F, T], 8),
        (swa(block_size=2, sliding_window=4), [T], 1),
        (swa(block_size=2, sliding_window=4), [T, F], 1),
        (full(block_size=2), [T, T, F, T], 2),
        (full(block_size=2), [F, T], 0),
        (chunked(block_size=2, attention_chunk_size=4), [F] * 8 + [T, F], 10),
        (mamba(block_size=2), [F, T, F, T, F], 4),
    ],
)
def test_longest_hits(spec: KVCacheSpec, cached: list[bool], length: int) -> None:
    manager = manager_of(spec)
    pool = manager.block_pool
    hashes = [BlockHash(bytes([i])) for i in range(len(cached))]
    for i, is_cached in enumerate(cached):
        if is_cached:
            key = make_block_hash_with_group_id(hashes[i], 0)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[i + 1])
    (hit,) = manager.find_longest_cache_hit(
        block_hashes=hashes,
        max_length=len(cached) * 2,
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=spec,
        drop_eagle_block=False,
        alignment_tokens=2,
    )
    assert len(hit) == length
    assert all(block.is_null or cached[i] for i, block in enumerate(hit))


def test_cross_attention_is_not_cached() -> None:
    manager = manager_of(cross())
    with pytest.raises(ValueError, match=r"(?i)cross"):
        manager.cache_blocks(make_request("r", range(32)), 32)
    with pytest.raises(NotImplementedError):
        manager.find_longest_cache_hit([], 0, [0], manager.block_pool, cross(), False, 16)


# ---- 7 coordinators ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "caches", "name"),
    [
        ([full()], False, "KVCacheCoordinatorNoPrefixCache"),
        ([], False, "KVCacheCoordinatorNoPrefixCache"),
        ([full()], True, "UnitaryKVCacheCoordinator"),
        ([full(), swa()], True, "HybridKVCacheCoordinator"),
    ],
)
def test_which_coordinator(specs: list[KVCacheSpec], caches: bool, name: str) -> None:
    manager = (
        make_manager(
            make_config(9, specs),
            scheduler_block_size=16,
            hash_block_size=16,
            enable_caching=caches,
        )
        if specs
        else None
    )
    if manager is None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        manager = KVCacheManager(make_config(1, []), 64, 16, 16, enable_caching=False)
    assert type(manager.coordinator).__name__ == name
    assert len(manager.coordinator.single_type_managers) == len(specs)


def test_sizes_must_be_multiples() -> None:
    specs = [full(block_size=32), swa(block_size=16)]
    with pytest.raises(AssertionError):
        make_manager(make_config(9, specs), scheduler_block_size=48)
    with pytest.raises(AssertionError):
        make_manager(make_config(9, [full()]), hash_block_size=8)


@pytest.mark.parametrize(
    ("flagged", "use_eagle", "expected"),
    [((1,), True, {1}), ((), True, {0, 1}), ((), False, set())],
)
def test_groups_of_a_drafter(flagged: tuple[int, ...], use_eagle: bool, expected: set[int]) -> None:
    config = make_config(9, [full(), swa()], eagle_groups=flagged)
    coordinator: Any = make_manager(config, use_eagle=use_eagle).coordinator
    assert coordinator.eagle_group_ids == expected
    assert [m.use_eagle for m in coordinator.single_type_managers] == [
        i in expected for i in (0, 1)
    ]
