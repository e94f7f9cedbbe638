import pytest

from tests.v1.core.specs import chunked, full, make_vllm_config, mamba, mla, swa, swa_mla
from vllm.v1.core.layout.grouping import (
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
    unify_page_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs


def layers(**counts):
    """Name ``count`` layers after each prefix: ``full=(spec, 2)`` gives full0 and full1."""
    return {f"{name}{i}": spec for name, (spec, n) in counts.items() for i in range(n)}


def names(groups):
    return [group.layer_names for group in groups]


class TestIsUniform:
    @pytest.mark.parametrize(
        ("specs", "expected"),
        [
            ([], True),
            ([full()], True),
            ([full(), full()], True),
            ([full(), full(sliding_window=8)], True),
            ([full(), full(head_size=32)], False),
            ([full(), swa()], False),
            ([swa(), full()], False),
            ([swa(), swa()], True),
            ([swa(), swa(sliding_window=64)], False),
            ([full(), mla()], False),
            ([mamba(), mamba()], True),
        ],
    )
    def test_is_uniform(self, specs, expected):
        assert is_kv_cache_spec_uniform(dict(enumerate(specs))) is expected

    def test_two_windows_are_an_error(self):
        """Not "not uniform": nothing could ever group these."""
        with pytest.raises(ValueError, match="window size"):
            is_kv_cache_spec_uniform({"a": full(sliding_window=8), "b": full(sliding_window=4)})


class TestUnifyHybrid:
    def test_window_and_chunk_keep_their_masks(self):
        specs = {"a": full(), "b": swa(page_size_padded=32 * 1024), "c": chunked()}
        unify_hybrid_kv_cache_specs(specs)
        assert specs == {
            "a": full(),
            "b": full(sliding_window=128, page_size_padded=32 * 1024),
            "c": full(attention_chunk_size=64),
        }

    def test_latent_windows(self):
        specs = {"a": mla(), "b": swa_mla(cache_dtype_str="x", alignment=64, compress_ratio=2)}
        unify_hybrid_kv_cache_specs(specs)
        assert specs["b"] == mla(
            sliding_window=128, cache_dtype_str="x", alignment=64, compress_ratio=2
        )

    @pytest.mark.parametrize(
        "specs",
        [{"a": swa(), "b": swa()}, {"a": full(), "b": full(head_size=8)}, {}],
        ids=["uniform", "uniform type", "none"],
    )
    def test_one_type_stays(self, specs):
        before = dict(specs)
        unify_hybrid_kv_cache_specs(specs)
        assert specs == before

    @pytest.mark.parametrize(
        "specs",
        [
            {"a": swa(), "b": swa(sliding_window=64)},
            {"a": swa(), "b": chunked()},
            {"a": full(), "b": mamba()},
            {"a": full(), "b": swa(block_size=32)},
        ],
        ids=["two windows", "no full", "mamba", "block sizes"],
    )
    def test_what_cannot_be_one_type(self, specs):
        with pytest.raises(ValueError, match="disable_hybrid_kv_cache_manager"):
            unify_hybrid_kv_cache_specs(specs)


class TestUnifyPageSizes:
    def test_smaller_pages_get_larger_blocks(self):
        wide = full(num_kv_heads=8)
        unified = unify_page_sizes({"a": full(), "b": wide, "c": swa(page_size_padded=16384)})
        assert unified["a"] == full(block_size=64)
        assert unified["b"] is wide
        assert unified["c"] == swa(block_size=32, page_size_padded=32768)
        assert {spec.page_size_bytes for spec in unified.values()} == {wide.page_size_bytes}

    def test_aligned_pages_meet(self):
        big = mla(block_size=32, head_size=4, num_kv_heads=1, page_size_padded=512)
        small = mla(block_size=16, head_size=4, num_kv_heads=1, alignment=256)
        unified = unify_page_sizes({"a": big, "b": small})
        assert unified["b"].page_size_bytes == 512
        assert unified["b"].block_size == 32

    def test_a_state_is_padded(self):
        state = mamba(shapes=((2048,),), dtypes=(full().dtype,))
        unified = unify_page_sizes({"a": full(), "b": state})
        assert unified["b"].block_size == state.block_size
        assert unified["b"].page_size_bytes == full().page_size_bytes

    def test_not_divisible(self):
        with pytest.raises(NotImplementedError, match="layer b has 6144 bytes"):
            unify_page_sizes({"a": full(), "b": swa(head_size=48)})


class TestGroups:
    def test_no_layers(self):
        assert get_kv_cache_groups(make_vllm_config(), {}) == []

    def test_equal_layers_form_one_group(self):
        groups = get_kv_cache_groups(make_vllm_config(), layers(full=(full(), 3)))
        assert groups == [KVCacheGroupSpec(["full0", "full1", "full2"], full())]

    def test_window_carriers_merge(self):
        specs = {"a": full(), "b": full(sliding_window=8)}
        groups = get_kv_cache_groups(make_vllm_config(), specs)
        assert groups == [KVCacheGroupSpec(["a", "b"], full(sliding_window=8))]

    def test_one_type_of_unequal_widths(self):
        specs = {"a": full(), "b": full(head_size=96)}
        groups = get_kv_cache_groups(make_vllm_config(), specs)
        assert groups == [KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(16, specs))]

    @pytest.mark.parametrize(
        ("num_full", "num_swa", "sizes"),
        [
            (3, 7, [3, 3, 2, 2]),  # 7 > 1.5 * 3: the smallest bucket
            (6, 5, [6, 5]),  # 6 < 1.5 * 5: the largest bucket
            (2, 3, [2, 2, 1]),  # 3 is not below 1.5 * 2
            (4, 4, [4, 4]),
            (1, 4, [1, 1, 1, 1, 1]),
        ],
    )
    def test_group_size(self, num_full, num_swa, sizes):
        specs = layers(full=(full(), num_full), swa=(swa(), num_swa))
        groups = get_kv_cache_groups(make_vllm_config(), specs)
        assert [len(group.layer_names) for group in groups] == sizes
        assert sorted(name for part in names(groups) for name in part) == sorted(specs)
        for group in groups:
            assert all(specs[name] == group.kv_cache_spec for name in group.layer_names)

    def test_layers_are_strided(self):
        specs = layers(full=(full(), 3), swa=(swa(), 7))
        assert names(get_kv_cache_groups(make_vllm_config(), specs)) == [
            ["full0", "full1", "full2"],
            ["swa0", "swa3", "swa6"],
            ["swa1", "swa4"],
            ["swa2", "swa5"],
        ]

    def test_pages_are_unified_first(self):
        specs = {"a": full(head_size=32), "b": swa()}
        groups = get_kv_cache_groups(make_vllm_config(), specs)
        assert [group.kv_cache_spec for group in groups] == [
            full(head_size=32, block_size=32),
            swa(),
        ]

    def test_hybrid_manager_off(self):
        config = make_vllm_config()
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        specs = {"a": full(), "b": swa()}
        groups = get_kv_cache_groups(config, specs)
        assert groups == [KVCacheGroupSpec(["a", "b"], full(sliding_window=128))]
        assert specs["b"] == full(sliding_window=128)  # in place

    def test_latent_windows_go_to_the_packed_layout(self):
        groups = get_kv_cache_groups(
            make_vllm_config(), {"w0": swa_mla(), "c": mla(block_size=64, compress_ratio=4)}
        )
        assert names(groups) == [["c"], ["w0"]]
