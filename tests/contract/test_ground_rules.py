"""Rules that are easy to miss: what outsiders patch, leave out, hand in and compare."""

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.v1.core.cache_helpers import make_config, make_manager, make_request
from tests.v1.core.specs import full, mla, swa
from vllm.distributed.kv_events import BlockStored
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_spec_registry
from vllm.v1.core import kv_cache_manager, kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

INTERVAL = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def test_the_variable_is_read_when_a_manager_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(20, [swa(sliding_window=16)])
    found = []
    for value in ("32", None, "64"):
        if value is None:
            monkeypatch.delenv(INTERVAL)
        else:
            monkeypatch.setenv(INTERVAL, value)
        found.append(make_manager(config).coordinator.retention_interval)
    assert found == [32, None, 64]
    monkeypatch.setenv(INTERVAL, "0")
    kept = make_manager(config)
    monkeypatch.setenv(INTERVAL, "16")
    assert kept.coordinator.retention_interval == 0


def test_embeddings_are_hashed_by_a_global_that_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def counted(tensor: Any) -> Any:
        calls.append(len(tensor))
        return tensor.tobytes()

    monkeypatch.setattr(kv_cache_utils, "tensor_data", counted)
    request = make_request("0", range(8), 4, prompt_embeds=np.arange(8.0))
    calls.clear()
    request._prompt_embeds_per_block_hashes.clear()
    first, _ = generate_block_hash_extra_keys(request, 0, 4, 0)
    again, _ = generate_block_hash_extra_keys(request, 0, 4, 0)
    assert first == again
    assert calls == [4]


@pytest.mark.parametrize("group", [7, -1])
def test_an_event_of_an_unknown_group_is_warned_of_and_passed_on(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = Mock()
    monkeypatch.setattr(kv_cache_manager, "logger", logger)
    manager = make_manager(make_config(5, [full()]), enable_kv_cache_events=True)
    event = BlockStored([1], None, [1] * 16, 16, None, None, None, group_idx=group)
    manager.block_pool.kv_event_queue.append(event)
    assert manager.take_events() == [event]
    logger.warning.assert_called_once_with("Group index `%s` not in KV cache metadata", group)
    assert kv_cache_manager.Request is Request


def test_blocks_of_no_pool_may_be_given_back() -> None:
    pool = BlockPool(5, True, 16)
    strays = [KVCacheBlock(i) for i in range(3)]
    pool.free_blocks(strays)
    assert [block.ref_cnt for block in strays] == [-1, -1, -1]
    assert pool.get_num_free_blocks() == 4
    manager = SlidingWindowManager(
        swa(block_size=2, sliding_window=4),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=2,
    )
    blocks = [KVCacheBlock(1000 + i) for i in range(5)]
    manager.req_to_blocks["r"] = list(blocks)
    null = [5, 6, 7, 11]
    skipped = []
    for num_computed in (4, *null):
        manager.remove_skipped_blocks("r", num_computed)
        skipped.append(sum(block.is_null for block in manager.req_to_blocks["r"]))
    assert skipped == [0, 1, 1, 2, 4]


def test_what_is_cached_already_is_not_looked_at() -> None:
    pool = BlockPool(5, True, 4)
    request = make_request("0", range(12), 4)
    stray = KVCacheBlock(0)
    pool.cache_full_blocks(
        request=request,
        blocks=[["anything"], ["anything"], stray],  # type: ignore[list-item]
        num_cached_blocks=2,
        num_full_blocks=3,
        block_size=4,
        kv_cache_group_id=0,
    )
    assert pool.get_cached_block(request.block_hashes[2], [0]) == [stray]


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_a_scheduler_without_init_updates_a_decode_step(kind: type[Scheduler]) -> None:
    request = make_request("r", range(5))
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = 5
    request.num_output_placeholders = 1 if kind is AsyncScheduler else 0
    scheduler: Any = object.__new__(kind)
    scheduler.perf_metrics = scheduler.connector = None
    scheduler.structured_output_manager = Mock()
    scheduler.requests = {"r": request}
    scheduler.running = [request]
    scheduler.waiting = Mock()
    scheduler.kv_cache_manager = Mock(**{"take_events.return_value": None})
    scheduler.kv_event_publisher = Mock()
    scheduler.finished_req_ids, scheduler.finished_req_ids_dict = set(), None
    scheduler.vllm_config = Mock()
    scheduler.enable_return_routed_experts = scheduler.recompute_kv_load_failures = False
    scheduler.make_stats = Mock(return_value=None)
    scheduler.max_model_len = 100
    scheduler._free_request = Mock(return_value=None)
    step = SchedulerOutput([], CachedRequestData.make_empty(), {"r": 1}, 1, {}, {}, [], set(), [])
    outputs = scheduler.update_from_output(step, ModelRunnerOutput(["r"], {"r": 0}, [[7]]))
    assert outputs[0].outputs[0].new_token_ids == [7]
    assert list(request.output_token_ids) == [7]
    scheduler._free_request.assert_not_called()
    request.max_tokens = 2
    request.num_output_placeholders = 1 if kind is AsyncScheduler else 0
    outputs = scheduler.update_from_output(step, ModelRunnerOutput(["r"], {"r": 0}, [[8]]))
    assert outputs[0].outputs[0].finish_reason is not None
    scheduler._free_request.assert_called_once_with(request)
    assert scheduler.running == []


def test_hashes_may_be_numbers() -> None:
    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=12,
        all_token_ids=list(range(12)),
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
    )
    found = get_request_block_hasher(4, hash)(request)  # type: ignore[arg-type]
    assert len(found) == 3
    assert all(isinstance(value, int) for value in found)


SPECS: tuple[KVCacheSpec, ...] = (full(), swa(), mla())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("make", [dataclasses.replace, copy.deepcopy])
def test_specs_are_values(spec: KVCacheSpec, make: Callable[[KVCacheSpec], KVCacheSpec]) -> None:
    twin = make(spec)
    assert twin == spec
    assert {spec: 1}[twin] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 3  # type: ignore[misc]


def test_private_state_has_its_names() -> None:
    pool = BlockPool(3, True, 16)
    assert pool.cached_block_hash_to_block._cache == {}
    assert pool._maybe_evict_cached_block(pool.blocks[1]) is False
    assert isinstance(kv_cache_spec_registry._REGISTRY_KVCACHESPEC_LIST, dict)
    for name in ("_free_request", "_update_waiting_for_remote_kv", "_inflight_prefills"):
        assert hasattr(Scheduler, name)
    assert isinstance(make_request("0", [1])._all_token_ids, list)
