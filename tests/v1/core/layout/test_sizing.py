import pytest

from tests.v1.core.specs import full, make_vllm_config, swa
from tests.v1.core.v4_geometry import v4_specs
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.core.layout.packing import group_for_packing, packed_block_stride
from vllm.v1.core.layout.sizing import (
    build_tensors,
    bytes_per_block,
    estimate_max_model_len,
    get_max_concurrency_for_kv_cache_config,
    needed_bytes,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)

PAGE = full().page_size_bytes


def named(prefix, spec, n):
    return {f"{prefix}{i}": spec for i in range(n)}


UNEQUAL = {"a": full(), "b": full(head_size=192)}
LAYOUTS = {
    "none": ([], 0),
    "no layer here": ([KVCacheGroupSpec([], full())], 0),
    "one group": ([KVCacheGroupSpec(["a", "b"], full())], 2 * PAGE),
    "two groups": (
        [KVCacheGroupSpec(["a", "b"], full()), KVCacheGroupSpec(["c"], swa())],
        2 * PAGE,
    ),
    "unequal": ([KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(16, UNEQUAL))], 4 * PAGE),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_per_block(name):
    groups, expected = LAYOUTS[name]
    assert bytes_per_block(groups) == expected
    num_blocks, tensors = build_tensors(groups, 10 * expected + 1)
    if not expected:
        assert (num_blocks, tensors) == (None, [])
        return
    assert num_blocks == 10
    assert sum(tensor.size for tensor in tensors) == 10 * expected


def test_layers_of_all_groups_share_tensors():
    groups, _ = LAYOUTS["two groups"]
    assert build_tensors(groups, 2 * PAGE * 3)[1] == [
        KVCacheTensor(3 * PAGE, ["a", "c"]),
        KVCacheTensor(3 * PAGE, ["b"]),
    ]


def test_groups_of_unequal_pages_are_our_bug():
    groups = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec(["b"], full(head_size=8))]
    with pytest.raises(AssertionError, match="one page size"):
        bytes_per_block(groups)


def test_need_counts_global_groups_and_own_layers():
    """A stage with one of three layers pays for all groups' blocks, each a third as wide."""
    config = make_vllm_config(160, max_num_batched_tokens=1)
    everywhere = [KVCacheGroupSpec(["a", "b", "c"], full()), KVCacheGroupSpec(["w"], swa())]
    here = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec([], swa())]
    assert needed_bytes(config, everywhere, here) == (10 + 9) * PAGE


def test_packed_pool():
    groups = group_for_packing(v4_specs(32, [0, 4, 128]))
    assert bytes_per_block(groups) == packed_block_stride(groups)


class TestEstimate:
    def test_published_number(self):
        """32 layers of 32 heads of 128 half-precision values: 512 KiB a token."""
        config = make_vllm_config(1 << 20)
        specs = named("l", full(num_kv_heads=32, head_size=128), 32)
        assert estimate_max_model_len(config, specs, 8 * GiB_bytes) == 16384
        assert config.model_config.max_model_len == 1 << 20

    @pytest.mark.parametrize("blocks", [0, 1, 5, 63, 64, 65])
    def test_against_counting(self, blocks):
        config = make_vllm_config(1024)
        specs = named("l", full(), 3)
        memory = blocks * 3 * PAGE
        assert estimate_max_model_len(config, specs, memory) == min(16 * blocks, 1024)
        if memory:
            assert estimate_max_model_len(config, specs, memory - 1) == min(16 * (blocks - 1), 1024)

    def test_restored_after_an_error(self):
        config = make_vllm_config(1024)
        with pytest.raises(NotImplementedError):
            estimate_max_model_len(config, {"a": KVCacheSpec(16)}, 1)
        assert config.model_config.max_model_len == 1024


class TestConcurrency:
    def config(self):
        return make_vllm_config(16384, max_num_batched_tokens=1024)

    @pytest.mark.parametrize(
        ("specs", "num_blocks", "expected"),
        [
            ([full()], int(1024 * 1.5), 1.5),
            ([swa(sliding_window=1024)], 129 * 3, 3),
            ([full(), swa(sliding_window=1024)], (1024 + 129) * 3, 3),
        ],
    )
    def test_published_numbers(self, specs, num_blocks, expected):
        groups = [KVCacheGroupSpec([f"{i}{j}" for j in range(4)], s) for i, s in enumerate(specs)]
        kv_cache_config = KVCacheConfig(num_blocks, [], groups)
        assert get_max_concurrency_for_kv_cache_config(self.config(), kv_cache_config) == expected

    def test_nothing_needed(self):
        assert get_max_concurrency_for_kv_cache_config(
            self.config(), KVCacheConfig(1, [], [])
        ) == float("inf")
