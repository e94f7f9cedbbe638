"""Registration, keyword arguments and refusals of Ascend's coordinator and manager."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ascend.v4_models import DEVICE_PAGES, embedded_config, v4_config
from tests.v1.core.unit_cache_driver import make_request
from vllm.exceptions import ConfigError
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.core.prefix.drafter_rows import can_rebuild
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.core.values.cache_settings import CacheSettings
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm_ascend.core.kv_cache_coordinator import AscendHybridKVCacheCoordinator
from vllm_ascend.core.managers import CompressAttentionManager
from vllm_ascend.core.masks import kept_block_mask
from vllm_ascend.core.specs import CompressAttentionSpec, ascend_kv_cache_specs
from vllm_ascend.platform import NPUPlatform, ReferencePlatform

ARGUMENTS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "use_eagle": False,
    "enable_caching": True,
    "enable_kv_cache_events": False,
    "dcp_world_size": 1,
    "pcp_world_size": 1,
    "scheduler_block_size": 32,
    "hash_block_size": 32,
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_all_kvcache_specs(None)
    platform = ReferencePlatform()
    for _ in range(2):  # equal registrations repeat without harm
        platform.register_custom_kv_cache_specs(None)


def make_config(
    ratios: Sequence[int] = (0, 4, 128, 4), *, window: int = 128, num_blocks: int = 400
) -> KVCacheConfig:
    """Groups as the worker has them, MTP's flagged: C4 and its state have unequal pages."""
    model = replace(v4_config(list(ratios)), sliding_window=window)
    groups = group_for_packing(ascend_kv_cache_specs(model, 32, DEVICE_PAGES))
    for group in groups:
        group.is_eagle_group = "mtp.0.attn.window" in group.layer_names
    blocks, tensors = build_packed_tensors(groups, 0, num_blocks)
    return KVCacheConfig(blocks, tensors, groups, hit_unit=32, coordinator_path=PATH)


def make_settings(config: KVCacheConfig, **changes: Any) -> CacheSettings:
    sizes = {"scheduler_block_size": 32, "hash_block_size": 32}
    return CacheSettings(
        kv_cache_config=config,
        max_model_len=1024,
        max_num_batched_tokens=256,
        enable_kv_cache_events=True,
        **{**sizes, **changes},
    )


class Keeper:
    """Serves prompts one by one on a class of coordinators; tells what boundaries keep."""

    def __init__(self, coordinator_path: str | None, config: KVCacheConfig) -> None:
        config = replace(config, coordinator_path=coordinator_path)
        self.unit = config.hit_unit
        sizes = (1024, self.unit, self.unit)
        self.manager = KVCacheManager(config, *sizes, enable_kv_cache_events=True)
        self.num_requests = 0

    def serve(self, prompt: list[int]) -> list[dict[int, int]]:
        """Serve a prompt; the blocks that each of its checkpoints holds, by group."""
        manager = self.manager
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", prompt, self.unit)
        manager.new_step_starts()
        found = manager.look_up(request)
        hit = found.num_tokens
        assert manager.allocate_slots(request, len(prompt) - hit, hit, found.blocks)
        manager.coordinator.commit_step()
        manager.take_step_work()
        request.num_computed_tokens = len(prompt)
        manager.check_invariants({request.request_id: len(prompt)})
        manager.free(request)
        coordinator = manager.coordinator
        assert isinstance(coordinator, CheckpointCoordinator)
        windows = coordinator.geometry.windows
        return [
            {g.group_id: len(blocks) for g, blocks in zip(windows, record.blocks, strict=True)}
            for record in coordinator.index.checkpoints.values()
        ]


class KeepsTwoUnitsMore(AscendHybridKVCacheCoordinator):
    """Another choice."""

    @classmethod
    def num_extra_rows(cls, group: KVCacheGroupSpec) -> int:
        return 64 if group.kv_cache_spec.window_tokens == 128 else 0


PATH = "vllm_ascend.core.kv_cache_coordinator.AscendHybridKVCacheCoordinator"
OTHER_PATH = f"{__name__}.{KeepsTwoUnitsMore.__name__}"


def test_the_platform_has_a_class_of_its_own_for_deepseek_v4_alone() -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=embedded_config()))
    for platform in (ReferencePlatform(), NPUPlatform()):
        assert platform.kv_cache_coordinator_path(config) == PATH
    assert CpuPlatform().kv_cache_coordinator_path(config) is None
    other: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config={"model_type": "qwen3"}))
    assert ReferencePlatform().kv_cache_coordinator_path(other) is None


def test_groups_are_unpacked_dense_and_sparse() -> None:
    coordinator = get_kv_cache_coordinator(kv_cache_config=make_config(), **ARGUMENTS)
    assert type(coordinator) is AscendHybridKVCacheCoordinator
    geometry = coordinator.geometry
    assert [group.block_size for group in geometry.dense] == [128, 4096]
    assert [group.block_size for group in geometry.windows][-2:] == [2, 8]
    assert geometry.unit == 32
    drafters = [group for group in geometry.groups if group.has_drafter_rows]
    assert [group.extra for group in geometry.groups] == [
        int(group in drafters) for group in geometry.groups
    ]
    assert len(drafters) == 1


@pytest.mark.parametrize("path", [None, PATH])
def test_a_boundary_keeps_what_the_drafter_reads_too(path: str | None) -> None:
    """A window whose block ends where the drafter's begins: the core keeps a block less."""
    config = make_config(window=129)
    keeper = Keeper(path, config)
    records = keeper.serve(list(range(700)))
    drafter = next(i for i, g in enumerate(config.kv_cache_groups) if g.is_eagle_group)
    other = next(i for i, g in enumerate(config.kv_cache_groups) if i > 1 and i != drafter)
    assert {record[other] for record in records} == {4}
    assert {record[drafter] for record in records} == {4 if path is None else 5}
    geometry = keeper.manager.coordinator.geometry
    assert can_rebuild(geometry.groups[drafter], 672) is (path is not None)


@pytest.mark.parametrize("unit", [32, 64, 128])
def test_a_window_of_whole_units_holds_the_drafters_row_already(unit: int) -> None:
    """Of a window of 128, P - 128 begins the block of P - 127: it costs nothing, and is there."""
    model = v4_config([0, 4, 128, 4])
    groups = group_for_packing(ascend_kv_cache_specs(model, unit, DEVICE_PAGES))
    for group in groups:
        group.is_eagle_group = "mtp.0.attn.window" in group.layer_names
    blocks, tensors = build_packed_tensors(groups, 0, 400)
    config = KVCacheConfig(blocks, tensors, groups, hit_unit=unit, coordinator_path=PATH)
    kept = {}
    for path in (None, PATH):
        keeper = Keeper(path, config)
        kept[path] = keeper.serve(list(range(700)))
        geometry = keeper.manager.coordinator.geometry
        (drafter,) = [group for group in geometry.groups if group.has_drafter_rows]
        boundary = 5 * 128
        assert drafter.first_needed(boundary) == boundary - 127 - int(path is not None)
        assert can_rebuild(drafter, boundary)
    assert kept[None] == kept[PATH]


def test_another_choice_keeps_other_blocks_and_hits_the_same() -> None:
    prompt = list(range(700))
    kept = {}
    for path in (PATH, OTHER_PATH):
        keeper = Keeper(path, make_config())
        kept[path] = keeper.serve(prompt)
        again = make_request("again", prompt, 32)
        assert keeper.manager.look_up(again).num_tokens == 672
    assert all(set(list(record.values())[:2]) == {4} for record in kept[PATH])
    assert all(set(list(record.values())[:2]) == {6} for record in kept[OTHER_PATH])


@pytest.mark.parametrize("window", [127, 128, 129, 130, 160, 161])
def test_served_checkpoints_hold_the_blocks_of_the_masks(window: int) -> None:
    keeper = Keeper(PATH, make_config(window=window))
    keeper.serve(list(range(700)))
    coordinator = keeper.manager.coordinator
    assert isinstance(coordinator, CheckpointCoordinator)
    records = coordinator.index.checkpoints.values()
    assert {record.position for record in records} >= {640, 672}
    for record in records:
        for group, blocks in zip(coordinator.geometry.windows, record.blocks, strict=True):
            mask = kept_block_mask(group, [record.position], record.position // group.block_size)
            assert len(blocks) == sum(mask), (group, record.position)


class ForgetsTheDrafter(AscendHybridKVCacheCoordinator):
    """Keeps too little."""

    @classmethod
    def num_extra_rows(cls, group: KVCacheGroupSpec) -> int:
        return 0


def test_a_class_that_keeps_too_little_is_refused() -> None:
    config = make_config(window=129)
    with pytest.raises(ConfigError, match=r"group 3 .*a boundary at 160, .*rows from 31 on"):
        ForgetsTheDrafter.arrange(config)
    # At the published window the block with the row is kept anyway.
    assert ForgetsTheDrafter.arrange(make_config()).hit_unit == 32


def test_what_it_is_told_by_name_wins() -> None:
    config = make_config()
    for group in config.kv_cache_groups:
        group.is_eagle_group = False
    coordinator = AscendHybridKVCacheCoordinator(
        make_settings(config, scheduler_block_size=4096),
        local_kv_retention_interval=256,
        scheduler_block_size=32,
        eagle_attn_layer_names=["mtp.0.attn.window"],
    )
    assert coordinator.policy.name == "256"
    flagged = [group.has_drafter_rows for group in coordinator.geometry.groups]
    assert flagged.count(True) == 1
    assert [group.extra for group in coordinator.geometry.groups] == list(map(int, flagged))
    assert coordinator.settings.scheduler_block_size == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dcp_world_size": 2}, "2 ranks"),
        ({"hash_block_size": 64}, "hash_block_size=64 and the hit unit 32"),
        ({"scheduler_block_size": 4096}, "scheduler_block_size=4096 and the hit unit 32"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_kv_cache_coordinator(kv_cache_config=make_config(), **{**ARGUMENTS, **change})


def test_a_drafter_that_is_in_no_group_is_refused() -> None:
    settings = make_settings(make_config())
    with pytest.raises(ConfigError, match=r"1 names that are in no KV cache group: mtp\.7"):
        AscendHybridKVCacheCoordinator(settings, eagle_attn_layer_names=["mtp.7"])


def test_groups_that_are_not_deepseek_v4s_are_refused() -> None:
    config = make_config()
    entries, state = config.kv_cache_groups[1], config.kv_cache_groups[-1]
    doubled = replace(entries.kv_cache_spec, block_size=2 * entries.kv_cache_spec.block_size)
    padded = replace(state.kv_cache_spec, page_size_padded=40_000)
    chunked = ChunkedLocalAttentionSpec(
        32, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
    )
    for group_id, spec, message in (
        (1, doubled, r"group 1 \(C128 entries: .*\) stores 64 rows in a block of 8192 tokens"),
        (
            -1,
            padded,
            r"1 state pages of \[40000\] bytes share no slot with pages of \[4160, 32768\]",
        ),
        (-1, chunked, "none of DeepSeek-V4's on Ascend"),
    ):
        groups = list(config.kv_cache_groups)
        groups[group_id] = replace(groups[group_id], kv_cache_spec=spec)
        with pytest.raises(ConfigError, match=message):
            AscendHybridKVCacheCoordinator.arrange(replace(config, kv_cache_groups=groups))


def test_pages_without_kernels_are_refused() -> None:
    config = make_config()
    group = config.kv_cache_groups[1]
    with pytest.raises(ConfigError, match="24 rows"):
        replace(group.kv_cache_spec, block_size=24 * 128)


def test_compressed_specs_have_their_manager() -> None:
    spec = CompressAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, compress_ratio=4
    )
    assert KVCacheSpecRegistry.get_manager_class(spec) is CompressAttentionManager
    core = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=512, dtype=torch.bfloat16)
    assert KVCacheSpecRegistry.get_manager_class(core) is not CompressAttentionManager


def test_the_manager_unpacks_unequal_pages() -> None:
    uniform = make_config().kv_cache_groups[0].kv_cache_spec
    pool = BlockPool(
        num_gpu_blocks=8, enable_caching=True, hash_block_size=32, enable_kv_cache_events=False
    )
    manager = CompressAttentionManager(
        uniform,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=4096,
    )
    assert manager.block_size == 128
    assert isinstance(manager.kv_cache_spec, CompressAttentionSpec)
