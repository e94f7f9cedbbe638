"""Random traffic over pool and manager: counts, queue, index, contents and events stay true."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.v1.core.cache_helpers import make_config, make_manager, make_request
from tests.v1.core.specs import chunked, full, mamba, swa
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

NUM_BLOCKS = 24
MAX_TOKENS = 96
HASH_BLOCK_SIZE = 4


def first_needed_token(spec: KVCacheSpec, num_computed: int) -> int:
    """Return the first token whose row the next token reads, by the attention's definition."""
    if isinstance(spec, SlidingWindowSpec):
        return max(num_computed + 1 - spec.sliding_window, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return num_computed - num_computed % spec.attention_chunk_size
    if isinstance(spec, MambaSpec):
        return max(num_computed - 1, 0)
    return 0


@dataclass
class Live:
    """A request under way."""

    request: Request
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, advance, decode, are preempted and finish; blocks are evicted."""

    specs: Sequence[KVCacheSpec] = ()
    eagle: Sequence[int] = ()

    def __init__(self) -> None:
        super().__init__()
        config = make_config(NUM_BLOCKS, self.specs, self.eagle)
        sizes = {spec.block_size for spec in self.specs}
        self.manager = make_manager(
            config,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=32,
            hash_block_size=HASH_BLOCK_SIZE if len(self.specs) > 1 else min(sizes),
            enable_kv_cache_events=True,
            log_stats=True,
        )
        self.live: dict[str, Live] = {}
        self.num_requests = 0
        # What a block's rows were computed from: the tokens up to its end.
        self.contents: dict[tuple[int, int], tuple[int, ...]] = {}
        # The index rebuilt from events.
        self.replayed: Counter[tuple[Any, Any]] = Counter()

    # ---- helpers -------------------------------------------------------------------------------

    def check_hit(self, tokens: Sequence[int], blocks: Any, num_hit: int) -> None:
        managers = self.manager.coordinator.single_type_managers
        assert num_hit < len(tokens) or num_hit == 0
        for group_id, (manager, group_blocks) in enumerate(
            zip(managers, blocks.blocks, strict=True)
        ):
            assert len(group_blocks) == num_hit // manager.block_size
            needed_from = first_needed_token(self.specs[group_id], num_hit)
            for i, block in enumerate(group_blocks):
                end = (i + 1) * manager.block_size
                assert not (block.is_null and end > needed_from)
                if not block.is_null:
                    stored = self.contents[group_id, block.block_id]
                    assert stored == tuple(tokens[:end])

    def write(self, live: Live, end: int) -> None:
        """Note what the step's rows are computed from."""
        tables = self.manager.get_blocks(live.request.request_id).blocks
        for group_id, (manager, table) in enumerate(
            zip(self.manager.coordinator.single_type_managers, tables, strict=True)
        ):
            first = live.num_computed // manager.block_size
            for i in range(first, min(-(-end // manager.block_size), len(table))):
                if not table[i].is_null:
                    covered = min(end, (i + 1) * manager.block_size)
                    self.contents[group_id, table[i].block_id] = tuple(live.tokens[:covered])
        live.num_computed = live.request.num_computed_tokens = end

    def drop(self, request_id: str) -> None:
        live = self.live.pop(request_id)
        self.manager.free(live.request)

    # ---- rules ---------------------------------------------------------------------------------

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 60),
        own=st.integers(1, 30),
        chunk=st.integers(1, 32),
        must_fit=st.booleans(),
    )
    def admit(self, family: int, shared: int, own: int, chunk: int, must_fit: bool) -> None:
        self.num_requests += 1
        tokens = [family] * shared + [10 + self.num_requests % 3] * own
        request = make_request(
            str(self.num_requests), tokens, self.manager.block_pool.hash_block_size
        )
        self.manager.new_step_starts()
        hit, num_hit = self.manager.get_computed_blocks(request)
        self.check_hit(tokens, hit, num_hit)
        new = min(chunk, len(tokens) - num_hit)
        before = self.manager.block_pool.get_num_free_blocks()
        blocks = self.manager.allocate_slots(
            request, new, num_hit, hit, full_sequence_must_fit=must_fit
        )
        if blocks is None:
            assert self.manager.block_pool.get_num_free_blocks() == before
            return
        live = Live(request, num_hit, tokens)
        self.live[request.request_id] = live
        self.write(live, num_hit + new)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 32), drafts=st.integers(0, 3))
    def advance(self, data: st.DataObject, chunk: int, drafts: int) -> None:
        live = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.manager.new_step_starts()
        remaining = len(live.tokens) - live.num_computed
        if remaining == 0:
            if len(live.tokens) >= MAX_TOKENS:
                return
            token = data.draw(st.integers(0, 1))
            live.tokens.append(token)
            live.request.append_output_token_ids(token)
            remaining = 1
        new = min(chunk, remaining)
        blocks = self.manager.allocate_slots(live.request, new, num_lookahead_tokens=drafts)
        if blocks is None:
            # Preempted: everything is given back, and the request may come again as another.
            self.drop(live.request.request_id)
            return
        self.write(live, live.num_computed + new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.live))))

    @rule(block_ids=st.sets(st.integers(1, NUM_BLOCKS - 1), max_size=3))
    def evict(self, block_ids: set[int]) -> None:
        self.manager.evict_blocks(block_ids)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() is (self.manager.usage == 0)

    # ---- what always holds ---------------------------------------------------------------------

    @invariant()
    def counts_queue_and_index_agree(self) -> None:
        self.manager.check_invariants()
        for manager in self.manager.coordinator.single_type_managers:
            assert set(manager.req_to_blocks) == set(self.live)
            assert set(manager.num_cached_block) <= set(self.live)

    @invariant()
    def tables_cover_what_is_needed(self) -> None:
        for request_id, live in self.live.items():
            managers = self.manager.coordinator.single_type_managers
            for spec, manager in zip(self.specs, managers, strict=True):
                table = manager.req_to_blocks[request_id]
                first = first_needed_token(spec, live.num_computed)
                for i in range(
                    first // manager.block_size, -(-live.num_computed // manager.block_size)
                ):
                    assert not table[i].is_null

    @invariant()
    def events_rebuild_the_index(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                assert len(event.extra_keys or ()) == len(event.block_hashes)
                # Each hash stands for the tokens of its block, whatever a mask leaves out.
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.replayed.update((h, event.group_idx) for h in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.replayed.subtract((h, event.group_idx) for h in event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.replayed.clear()
        index: Counter[tuple[Any, Any]] = Counter()
        for block in self.manager.block_pool.blocks:
            key = block.block_hash
            if key is not None:
                index[maybe_convert_block_hash(get_block_hash(key)), get_group_id(key)] += 1
        assert +self.replayed == index


CONFIGS: dict[str, tuple[Sequence[KVCacheSpec], Sequence[int], str | None]] = {
    "full": ([full(block_size=4)], (), None),
    "full-eagle": ([full(block_size=4)], (0,), None),
    "window": ([swa(block_size=4, sliding_window=10)], (), None),
    "window-interval": ([swa(block_size=4, sliding_window=6)], (), "16"),
    "chunked": ([chunked(block_size=4, attention_chunk_size=16)], (), None),
    "hybrid": ([full(block_size=16), swa(block_size=4, sliding_window=8)], (), None),
    "hybrid-latest": ([full(block_size=16), swa(block_size=4, sliding_window=8)], (), "0"),
    "hybrid-interval-eagle": (
        [full(block_size=16), swa(block_size=4, sliding_window=5), swa(block_size=8)],
        (1,),
        "32",
    ),
    "mamba": ([full(block_size=16), mamba(block_size=16)], (), None),
    "mamba-align": (
        [
            full(block_size=16),
            mamba(block_size=16, mamba_cache_mode="align", num_speculative_blocks=1),
        ],
        (),
        None,
    ),
}


WITH_WINDOWS = [name for name in CONFIGS if "window" in name or "hybrid" in name]


@pytest.mark.slow
@pytest.mark.parametrize("max_pinned_share", ["0.1", "0.5", "1"])
@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_random_traffic_with_pins(
    name: str, max_pinned_share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.setenv("VLLM_PIN_MIN_DROP_SIZE", "1")
    monkeypatch.setenv("VLLM_PIN_MAX_SHARE", max_pinned_share)
    run_traffic(name, monkeypatch, max_examples=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_random_traffic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PIN_SWA_TOKENS", raising=False)
    run_traffic(name, monkeypatch, max_examples=25)


def run_traffic(name: str, monkeypatch: pytest.MonkeyPatch, max_examples: int) -> None:
    """Run the state machine on one configuration."""
    specs, eagle, interval = CONFIGS[name]
    variable = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
    if interval is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, interval)
    machine = type("Machine", (CacheMachine,), {"specs": specs, "eagle": eagle})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
