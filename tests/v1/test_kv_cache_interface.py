import copy
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from tests.v1.core.specs import (
    FLOAT,
    HALF,
    chunked,
    full,
    make_vllm_config,
    mamba,
    mla,
    state,
    swa,
    swa_mla,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    KVCacheTensor,
    KVQuantMode,
    SinkFullAttentionSpec,
    TQFullAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    member_spec,
)

KW = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": HALF}


ALL_SPECS = [full(), swa(), chunked(), mla(), swa_mla(), mamba(), state()]


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda s: type(s).__name__)
def test_specs_are_values(spec):
    assert copy.deepcopy(spec) == spec
    assert hash(copy.deepcopy(spec)) == hash(spec)
    assert replace(spec) == spec
    larger = spec.copy_with_new_block_size(spec.block_size * 2)
    assert type(larger) is type(spec)
    assert larger.block_size == spec.block_size * 2
    assert larger != spec
    with pytest.raises(FrozenInstanceError):
        spec.block_size = 1


class TestPageSize:
    def test_attention(self):
        assert AttentionSpec(**KW).page_size_bytes == 2 * 16 * 2 * 64 * 2

    def test_full_with_narrow_values(self):
        assert full().head_size_v == 64
        assert full().page_size_bytes == 2 * 16 * 2 * 64 * 2
        assert full(head_size_v=32).page_size_bytes == 16 * 2 * (64 + 32) * 2

    def test_sliding_window_with_narrow_values(self):
        assert swa().page_size_bytes == full().page_size_bytes
        assert swa(head_size_v=32).page_size_bytes == 16 * 2 * (64 + 32) * 2

    def test_int8_rows_have_a_scale_of_each_head(self):
        int8 = {"dtype": torch.int8, "kv_quant_mode": KVQuantMode.of_dtype(torch.int8)}
        for spec in (full(**int8), swa(**int8)):
            assert spec.page_size_bytes == 16 * 2 * 2 * (64 + 4)
            assert spec.page_layout().width == 2 * 2 * (64 + 4)
            assert spec.with_key_sizes("a") != spec.with_key_sizes("b")
        assert KVQuantMode.of_dtype(torch.float16) is KVQuantMode.NONE
        assert full().with_key_sizes("a") == full()

    def test_padding_wins_but_never_shrinks(self):
        assert full(page_size_padded=10_000).page_size_bytes == 10_000
        with pytest.raises(AssertionError, match="page_size_padded 10 "):
            _ = full(page_size_padded=10).page_size_bytes

    def test_mla_stores_one_row_per_ratio(self):
        spec = mla(block_size=256, compress_ratio=4)
        assert spec.storage_block_size == 64
        assert spec.page_size_bytes == 64 * 576 * 2

    @pytest.mark.parametrize(("version", "row"), [(None, 656), ("deepseek_v4", 584)])
    @pytest.mark.parametrize("make", [mla, swa_mla])
    def test_fp8_rows(self, make, version, row):
        spec = make(block_size=64, cache_dtype_str="fp8_ds_mla", model_version=version)
        assert spec.page_size_bytes == 64 * row

    @pytest.mark.parametrize("make", [mla, swa_mla])
    def test_alignment_rounds_up(self, make):
        spec = make(block_size=1, head_size=3, alignment=64)
        assert spec.real_page_size_bytes == 6
        assert spec.page_size_bytes == 64
        assert replace(spec, page_size_padded=70).page_size_bytes == 70
        # Computed, not stored: a larger block is aligned anew.
        assert spec.copy_with_new_block_size(32).page_size_bytes == 192

    def test_sliding_window_mla_does_not_double(self):
        assert swa_mla(block_size=8).page_size_bytes == 8 * 576 * 2

    def test_compressor_state_is_not_per_head(self):
        assert state(num_kv_heads=7).page_size_bytes == 2 * 100 * 4

    def test_quantized_slots(self):
        assert TQFullAttentionSpec(**KW, tq_slot_size=40).page_size_bytes == 16 * 2 * 40
        assert TQFullAttentionSpec(**KW).page_size_bytes == full().page_size_bytes

    def test_mamba(self):
        assert mamba().page_size_bytes == 2 * 512 * 4 + 3 * 8 * 2
        assert mamba(page_size_padded=9000).page_size_bytes == 9000

    def test_mamba_page_is_lazy(self):
        placeholder = mamba(shapes=(1, 1), dtypes=(FLOAT,))  # no error here
        with pytest.raises(TypeError):
            _ = placeholder.page_size_bytes

    def test_base_refuses(self):
        with pytest.raises(NotImplementedError, match="page size"):
            _ = KVCacheSpec(16).page_size_bytes
        assert KVCacheSpec(16).storage_block_size == 16


class TestMemory:
    def test_full(self):
        config = make_vllm_config(max_model_len=1000)
        assert full().max_memory_usage_bytes(config) == 63 * full().page_size_bytes

    def test_context_parallel_ranks_share_tokens(self):
        config = make_vllm_config(max_model_len=1001, dcp=2)
        assert full().max_memory_usage_bytes(config) == 32 * full().page_size_bytes

    @pytest.mark.parametrize(
        ("window", "batched", "max_len", "expected"),
        [
            (1024, 1024, 16384, 129),
            (64, 128, 16384, 13),
            (64, 128, 100, 8),
            (1, 1, 100, 2),
        ],
    )
    def test_sliding_window_cap(self, window, batched, max_len, expected):
        spec = swa(sliding_window=window)
        assert spec.max_admission_blocks_per_request(batched, max_len) == expected
        config = make_vllm_config(max_model_len=max_len, max_num_batched_tokens=batched)
        assert spec.max_memory_usage_bytes(config) == expected * spec.page_size_bytes

    @pytest.mark.parametrize(
        ("batched", "max_len", "expected"), [(128, 16384, 12), (127, 16384, 12), (128, 100, 7)]
    )
    def test_chunked_cap(self, batched, max_len, expected):
        spec = chunked(attention_chunk_size=64)
        assert spec.max_admission_blocks_per_request(batched, max_len) == expected
        config = make_vllm_config(max_model_len=max_len, max_num_batched_tokens=batched)
        assert spec.max_memory_usage_bytes(config) == expected * spec.page_size_bytes

    @pytest.mark.parametrize(("mode", "states"), [("none", 1), ("align", 2), ("all", 63)])
    @pytest.mark.parametrize("drafts", [0, 3])
    def test_mamba(self, mode, states, drafts):
        config = make_vllm_config(max_model_len=1000, mamba_cache_mode=mode)
        spec = mamba(num_speculative_blocks=drafts)
        assert spec.max_memory_usage_bytes(config) == (states + drafts) * spec.page_size_bytes

    def test_encoder_kinds(self):
        config = make_vllm_config(max_num_batched_tokens=100)
        cross = CrossAttentionSpec(**KW)
        assert cross.max_memory_usage_bytes(config) == 7 * cross.page_size_bytes
        assert EncoderOnlyAttentionSpec(**KW).max_memory_usage_bytes(config) == 0

    def test_uniform_takes_the_neediest_layer(self):
        config = make_vllm_config(max_model_len=160)
        spec = UniformTypeKVCacheSpecs(16, {"a": full(), "b": full(head_size=32)})
        assert spec.page_size_bytes == full().page_size_bytes * 3 // 2
        assert spec.max_memory_usage_bytes(config) == 10 * spec.page_size_bytes


class TestMerge:
    def test_default_wants_equality(self):
        a = swa()
        merged = a.merge([a, swa()])
        assert merged == a
        assert merged is not a
        with pytest.raises(AssertionError):
            a.merge([a, swa(sliding_window=64)])

    def test_full_takes_the_one_window(self):
        specs = [full(), full(sliding_window=32), full(sliding_window=32)]
        assert full().merge(specs) == full(sliding_window=32)
        assert full().merge([full(), full()]) == full()

    def test_full_takes_the_one_chunk(self):
        assert full().merge([full(attention_chunk_size=8), full()]).attention_chunk_size == 8

    def test_two_windows_are_a_value_error(self):
        with pytest.raises(ValueError, match=r"window size.*\[32, 64\]"):
            full().merge([full(sliding_window=32), full(sliding_window=64)])

    @pytest.mark.parametrize(
        "other",
        [
            full(num_kv_heads=4),
            full(head_size=32),
            full(dtype=FLOAT),
            full(block_size=32),
            full(page_size_padded=1 << 20),
            swa(),
            mla(),
            TQFullAttentionSpec(**KW, tq_slot_size=8),
        ],
        ids=repr,
    )
    def test_full_refuses(self, other):
        with pytest.raises(AssertionError):
            full().merge([full(), other])

    def test_window_and_chunk_do_not_mix(self):
        with pytest.raises(AssertionError, match="cannot share"):
            full().merge([full(sliding_window=8), full(attention_chunk_size=8)])

    @pytest.mark.parametrize(
        "other",
        [
            mla(cache_dtype_str="fp8_ds_mla"),
            mla(compress_ratio=4),
            mla(model_version="deepseek_v4"),
            full(),
            HiddenStateCacheSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=HALF),
        ],
        ids=repr,
    )
    def test_mla_refuses(self, other):
        assert mla().merge([mla(), mla()]) == mla()
        with pytest.raises(AssertionError):
            mla().merge([mla(), other])

    def test_sink_keeps_its_length(self):
        sink = SinkFullAttentionSpec(**KW, sink_len=4)
        assert sink.merge([sink, replace(sink)]).sink_len == 4
        with pytest.raises(AssertionError):
            sink.merge([sink, replace(sink, sink_len=8)])


class TestCompressorState:
    def test_window_follows_the_ratio(self):
        assert state(state_ratio=128, state_overlap=False, sliding_window=128)
        with pytest.raises(AssertionError, match="window of 8"):
            state(sliding_window=128)
        with pytest.raises(AssertionError, match="window of 4"):
            state(state_overlap=False)


class TestMembers:
    def test_of_a_plain_spec(self):
        assert full().members() == (full(),)
        assert member_spec(full()) == full()
        assert KVCacheGroupSpec(["a", "b"], full()).layer_specs() == {"a": full(), "b": full()}

    def test_of_a_uniform_spec(self):
        specs = {"a": full(), "b": full(head_size=32)}
        spec = UniformTypeKVCacheSpecs(16, specs)
        assert spec.members() == tuple(specs.values())
        assert member_spec(spec) in spec.members()
        assert KVCacheGroupSpec(["b"], spec).layer_specs() == {"b": specs["b"]}


class TestUniform:
    def test_full_group_of_widths(self):
        specs = {"a": full(), "b": full(head_size=32), "c": TQFullAttentionSpec(**KW)}
        assert UniformTypeKVCacheSpecs.is_uniform_type(specs)
        assert UniformTypeKVCacheSpecs.from_specs(specs).kv_cache_specs == specs

    @pytest.mark.parametrize(
        "specs",
        [
            {"a": full(), "b": full(block_size=32)},
            {"a": full(), "b": swa()},
            {"a": swa(), "b": full()},
            {"a": swa(), "b": swa(sliding_window=64)},
            {"a": swa_mla(), "b": swa()},
            {"a": swa_mla(), "b": swa_mla(sliding_window=64)},
            {"a": chunked(), "b": chunked(attention_chunk_size=32)},
            {"a": mamba(), "b": mamba(num_speculative_blocks=1)},
            {"a": mamba(), "b": full()},
        ],
        ids=lambda specs: "-".join(type(s).__name__ for s in specs.values()),
    )
    def test_not_uniform(self, specs):
        assert not UniformTypeKVCacheSpecs.is_uniform_type(specs)
        assert UniformTypeKVCacheSpecs.from_specs(specs) is None

    @pytest.mark.parametrize(
        "specs",
        [
            {"a": swa(), "b": swa(head_size=8)},
            {"a": swa_mla(), "b": swa_mla(head_size=8)},
            {"a": chunked(), "b": chunked(head_size=8)},
            {"a": mamba(), "b": mamba(shapes=((1, 1),), dtypes=(HALF,))},
            {"a": full(), "b": mla()},
        ],
        ids=lambda specs: "-".join(type(s).__name__ for s in specs.values()),
    )
    def test_uniform(self, specs):
        assert UniformTypeKVCacheSpecs.is_uniform_type(specs)

    def test_compressor_states_of_one_shape(self):
        assert state().is_uniform_with_collection({"a": state(), "b": state(head_size=64)})
        other = state(state_ratio=8, state_overlap=False)
        assert not state().is_uniform_with_collection({"a": state(), "b": other})

    def test_unregistered(self):
        with pytest.raises(AssertionError, match="Unsupported KV cache spec type"):
            KVCacheSpec(16).is_uniform_with_collection({})


class TestKind:
    @pytest.mark.parametrize(
        ("spec", "kind"),
        [
            (full(), KVCacheSpecKind.FULL_ATTENTION),
            (TQFullAttentionSpec(**KW), KVCacheSpecKind.FULL_ATTENTION),
            (mla(), KVCacheSpecKind.MLA_ATTENTION),
            (HiddenStateCacheSpec(**KW), KVCacheSpecKind.MLA_ATTENTION),
            (swa(), KVCacheSpecKind.SLIDING_WINDOW),
            (swa_mla(), KVCacheSpecKind.SLIDING_WINDOW_MLA),
            (state(), KVCacheSpecKind.SLIDING_WINDOW_MLA),
            (mamba(), KVCacheSpecKind.MAMBA),
            (chunked(), KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION),
            (SinkFullAttentionSpec(**KW), KVCacheSpecKind.SINK_FULL_ATTENTION),
            (EncoderOnlyAttentionSpec(**KW), KVCacheSpecKind.ENCODER_ONLY_ATTENTION),
            (CrossAttentionSpec(**KW), KVCacheSpecKind.CROSS_ATTENTION),
            (KVCacheSpec(16), KVCacheSpecKind.UNKNOWN),
            (UniformTypeKVCacheSpecs(16, {"a": mla(), "b": mla()}), KVCacheSpecKind.MLA_ATTENTION),
            (UniformTypeKVCacheSpecs(16, {"a": mla(), "b": full()}), KVCacheSpecKind.UNKNOWN),
        ],
    )
    def test_kind(self, spec, kind):
        assert get_kv_cache_spec_kind(spec) is kind

    def test_values_are_plain_names(self):
        assert KVCacheSpecKind.SLIDING_WINDOW_MLA.value == "sliding_window_mla"
        assert all(kind.value == kind.name.lower() for kind in KVCacheSpecKind)
        assert KVCacheSpecKind.MAMBA == "mamba"

    def test_window(self):
        assert get_kv_cache_spec_sliding_window(swa()) == 128
        assert get_kv_cache_spec_sliding_window(swa_mla(sliding_window=8)) == 8
        assert get_kv_cache_spec_sliding_window(full(sliding_window=8)) is None
        assert get_kv_cache_spec_sliding_window(mamba()) is None
        same = UniformTypeKVCacheSpecs(16, {"a": swa(), "b": swa(head_size=8)})
        assert get_kv_cache_spec_sliding_window(same) == 128
        mixed = UniformTypeKVCacheSpecs(16, {"a": swa(), "b": full()})
        assert get_kv_cache_spec_sliding_window(mixed) is None


class TestConfig:
    def test_defaults_and_equality(self):
        assert KVCacheTensor(8, ["a"]) == KVCacheTensor(size=8, shared_by=["a"])
        assert KVCacheTensor(8, ["a"]).offsets is None
        assert KVCacheGroupSpec(["a"], full()) == KVCacheGroupSpec(["a"], full(), False)
        config = KVCacheConfig(10, [], [KVCacheGroupSpec(["a"], full())])
        assert config == copy.deepcopy(config)
        assert config.hit_unit is None

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            (full(), False),
            (mamba(), True),
            (UniformTypeKVCacheSpecs(16, {"a": mamba(), "b": mamba()}), True),
        ],
    )
    def test_mamba_needs_zeroing(self, spec, expected):
        config = KVCacheConfig(10, [], [KVCacheGroupSpec(["a"], spec)])
        assert config.has_mamba_layers is expected
        assert config.needs_kv_cache_zeroing is expected
