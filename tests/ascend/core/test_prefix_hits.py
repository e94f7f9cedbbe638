"""Hits over Ascend's groups of V4-Flash and V4-Pro with MTP: the control plane, without a model."""

import random
from math import gcd, lcm
from typing import Any

import pytest

from tests.ascend.v4_models import A5_PAGES, DEVICE_PAGES, FLASH, PRO, v4_config
from tests.v1.core.unit_cache_driver import make_request
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_scheduler_kv_cache_config,
)
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.core.single_type_kv_cache_manager import (
    SlidingWindowManager,
    register_all_kvcache_specs,
)
from vllm.v1.core.values.cache_settings import CacheSettings
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowMLASpec, SlidingWindowSpec
from vllm.v1.request import Request
from vllm_ascend.core.geometry import Generation
from vllm_ascend.core.managers import CompressAttentionManager
from vllm_ascend.core.specs import ascend_kv_cache_specs
from vllm_ascend.platform import ReferencePlatform

MTP_CACHE = "mtp.0.attn.window"
MAX_LEN = 17_408
LOOKAHEAD = 1


@pytest.fixture(autouse=True)
def _registered() -> None:
    register_all_kvcache_specs(None)
    platform = ReferencePlatform()
    platform.register_custom_kv_cache_specs(None)


def make_config(
    unit: int | None,
    ratios: list[int],
    generation: Generation = Generation.A2_A3,
    num_blocks: int = 1_000,
) -> KVCacheConfig:
    """The groups that the worker makes, the drafter's flagged; ``unit`` None: the contract's."""
    pages = A5_PAGES if generation is Generation.A5 else DEVICE_PAGES
    specs = ascend_kv_cache_specs(v4_config(ratios), unit, pages, generation)
    groups = group_for_packing(specs)
    for group in groups:
        group.is_eagle_group = MTP_CACHE in group.layer_names
    count, tensors = build_packed_tensors(groups, 0, num_blocks)
    return KVCacheConfig(count, tensors, groups, hit_unit=unit)


class Server:
    """Serves one request at a time, as the scheduler does, and ends it."""

    def __init__(self, manager: Any, unit: int, chunk: int = 2_048) -> None:
        self.manager, self.unit, self.chunk = manager, unit, chunk
        self.num_requests = 0

    def serve(self, prompt: list[int], answer: list[int] | None = None) -> int:
        """Compute a prompt and an answer; the tokens of its hit."""
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", prompt, self.unit)
        blocks, hit = self.manager.get_computed_blocks(request)
        for token in [None, *(answer or [])]:
            if token is not None:
                request.append_output_token_ids(token)
            while request.num_computed_tokens < request.num_tokens:
                self._step(request, blocks if not request.num_computed_tokens else None, hit)
        self._check()
        self.manager.free(request)
        self._check()
        return hit

    def _step(self, request: Request, blocks: Any, hit: int) -> None:
        manager, is_first = self.manager, blocks is not None
        manager.new_step_starts()
        start = hit if is_first else request.num_computed_tokens
        count = min(self.chunk, request.num_tokens - start)
        taken = manager.allocate_slots(
            request,
            count,
            hit if is_first else 0,
            blocks,
            num_lookahead_tokens=LOOKAHEAD,
        )
        assert taken is not None
        request.num_computed_tokens = start + count
        self._end_step()

    def _check(self) -> None:
        self.manager.check_invariants()

    def _end_step(self) -> None:
        self.manager.coordinator.commit_step()
        self.manager.take_step_work()


def make_unit_server(
    unit: int, ratios: list[int], generation: Generation = Generation.A2_A3
) -> Server:
    manager = KVCacheManager.from_settings(
        CacheSettings(
            kv_cache_config=make_config(unit, ratios, generation),
            max_model_len=MAX_LEN,
            max_num_batched_tokens=MAX_LEN,
            scheduler_block_size=unit,
            hash_block_size=unit,
            use_eagle=True,
            num_lookahead_tokens=LOOKAHEAD,
        )
    )
    assert isinstance(manager.coordinator, CheckpointCoordinator)
    return Server(manager, unit)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


MODELS = [(FLASH, Generation.A2_A3), (PRO, Generation.A2_A3), (FLASH, Generation.A5)]


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize(("ratios", "generation"), MODELS, ids=["Flash A3", "Pro A3", "Flash A5"])
def test_a_resend_with_mtp_hits_the_last_boundary(
    unit: int, ratios: list[int], generation: Generation
) -> None:
    """8,192 tokens hit 0 or 4,096 of them where hits align to the blocks' common multiple."""
    server, rng = make_unit_server(unit, ratios, generation), random.Random(unit)
    for length in (unit + 1, 1_000, 8_192, 8_200):
        prompt = tokens(rng, length)
        assert server.serve(prompt, [1]) == 0
        assert server.serve(prompt, [1]) == (length - 1) // unit * unit


@pytest.mark.parametrize("unit", [32, 64, 128])
@pytest.mark.parametrize("ratios", [FLASH, PRO], ids=["Flash", "Pro"])
@pytest.mark.parametrize("length", [900, 1_000, 6_400])
def test_siblings_of_a_system_prompt_hit_with_mtp(
    unit: int, ratios: list[int], length: int
) -> None:
    """The third sees where the first two parted; the drafter costs it one unit at most."""
    server, rng = make_unit_server(unit, ratios), random.Random(length)
    system = tokens(rng, length)
    for _ in range(2):
        server.serve(system + tokens(rng, 300), tokens(rng, 40))
    shared = length // unit * unit
    for _ in range(3):
        assert shared - unit <= server.serve(system + tokens(rng, 300), [1]) <= shared


@pytest.mark.parametrize("unit", [32, 128])
def test_the_next_turn_hits_the_answer_with_mtp(unit: int) -> None:
    server, rng = make_unit_server(unit, FLASH), random.Random(unit)
    prompt, answer = tokens(rng, 3_000), tokens(rng, 200)
    server.serve(prompt, answer)
    computed = len(prompt) + len(answer)
    hit = server.serve(prompt + answer + tokens(rng, 50))
    assert (computed - 1) // unit * unit - unit <= hit <= computed


# ---- hits at whole blocks: the interface of the core, with Ascend's specs and managers -----------


class ContractServer(Server):
    """Serves over the managers of whole blocks."""

    def _end_step(self) -> None:
        pass

    def _check(self) -> None:
        pool = self.manager.block_pool
        held = {
            block.block_id
            for table in self.manager.get_blocks(f"r{self.num_requests}").blocks
            for block in table
            if not block.is_null
        }
        # The null block heads every window's table, but is nobody's: it is never counted.
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(held)
        assert pool.null_block.block_hash is None

    def cached_blocks(self, group_id: int, prompt: list[int]) -> list[int]:
        """The blocks of a prompt that the group has under their hash."""
        request = make_request("probe", prompt, self.unit)
        size = self.manager.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec.block_size
        hashes = BlockHashListWithBlockSize(request.block_hashes, self.unit, size)
        pool = self.manager.block_pool
        return [i for i in range(len(hashes)) if pool.get_cached_block(hashes[i], [group_id])]


def make_contract_server() -> ContractServer:
    """Hits at whole blocks: the core's hybrid coordinator with Ascend's specs and managers."""
    config = generate_scheduler_kv_cache_config([make_config(None, FLASH, num_blocks=20_000)])
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    assert sizes == [128, 4096, 32, 32, 2, 8]
    hash_block = gcd(*sizes)
    manager = KVCacheManager(
        config,
        MAX_LEN,
        scheduler_block_size=lcm(*sizes),
        hash_block_size=hash_block,
        use_eagle=True,
    )
    assert isinstance(manager, KVCacheManager)
    kinds = [type(m) for m in manager.coordinator.single_type_managers]
    assert kinds == [CompressAttentionManager] * 2 + [SlidingWindowManager] * 4
    return ContractServer(manager, hash_block)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 4_096, 8_192])
def test_the_interval_reaches_every_group(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed groups are dense; window groups keep the tails below the interval's boundaries.

    The windows are the drafter's group and its sibling of the same spec: a block more, one later.
    """
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", str(interval))
    server, length = make_contract_server(), 17_000
    prompt = tokens(random.Random(1), length)
    server.serve(prompt)
    last = length // 4_096 * 4_096
    boundaries = {last} | set(range(interval, last + 1, interval or last))
    boundaries -= {0}
    groups = server.manager.kv_cache_config.kv_cache_groups
    for group_id, group in enumerate(groups):
        spec = group.kv_cache_spec
        if not isinstance(spec, SlidingWindowSpec):
            expected = list(range(last // spec.block_size))
        else:
            is_eagle = isinstance(spec, SlidingWindowMLASpec) and group_id in (2, 3)
            need = -(-(spec.sliding_window - 1) // spec.block_size) + is_eagle
            ends = sorted(p // spec.block_size + is_eagle for p in boundaries)
            expected = [block for end in ends for block in range(end - need, end)]
        assert server.cached_blocks(group_id, prompt) == expected, group.layer_names[0]


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["4096", None])
def test_siblings_hit_whole_blocks_with_mtp(
    interval: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared system prompt is hit down to the common multiple of the blocks, also with MTP."""
    if interval is not None:
        monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", interval)
    server, rng = make_contract_server(), random.Random(2)
    system = tokens(rng, 9_000)
    assert server.serve(system + tokens(rng, 4_000)) == 0
    assert server.serve(system + tokens(rng, 4_000)) == 8_192
    again = system + tokens(rng, 4_000)
    assert server.serve(again) == 8_192
    assert server.serve(again) == 12_288
