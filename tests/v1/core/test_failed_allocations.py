"""The n-th allocation fails, for every n: nothing is lost, leaked or answered otherwise.

A pool that refuses is injected at each place where blocks are taken, one after the other. After
every step all invariants hold; in the end every request has the tokens that the model gives, and
all blocks are free.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.v1.core.recurrent_geometry import recurrent_config
from tests.v1.core.sched.builders import (
    all_blocks_free,
    answer,
    full_config,
    hybrid_config,
    make_request,
    make_scheduler,
    outputs_by_request,
)
from tests.v1.core.sched.fake_executor import FakeExecutor
from tests.v1.core.test_shared_pool import check_owners
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.window_geometry import GEMMA_LIKE, LLAMA_LIKE, MISTRAL_LIKE, window_config
from vllm.config import KVTransferConfig
from vllm.config.tenants import Tenant, TenantsConfig
from vllm.exceptions import NoFreeBlocksError
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.shared_pool import SharedPool
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.messages import FinishReason
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request

UNIT = 32
MAX_STEPS = 600


class Refusals:
    """Counts allocations, and refuses the ``fail_at``-th; 0: none."""

    def __init__(self, fail_at: int) -> None:
        self.fail_at = fail_at
        self.count = 0

    def note(self) -> None:
        """Count an allocation that is about to happen."""
        self.count += 1
        if self.count == self.fail_at:
            raise NoFreeBlocksError("injected")


@contextmanager
def refusing(fail_at: int) -> Iterator[Refusals]:
    """Let one allocation fail, wherever it happens: those inside of a pool of shares count too."""
    refusals = Refusals(fail_at)
    take, take_from = TieredPool.get_new_blocks, SharedPool._take_from

    def get_new_blocks(pool: TieredPool, num_blocks: int) -> Any:
        if num_blocks:
            refusals.note()
        return take(pool, num_blocks)

    def refuse_or_take_from(pool: SharedPool, owned: Any) -> Any:
        refusals.note()
        return take_from(pool, owned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TieredPool, "get_new_blocks", get_new_blocks)
        patch.setattr(SharedPool, "_take_from", refuse_or_take_from)
        yield refusals


def sample(request_id: str, index: int) -> int:
    """The model: the same tokens for a request, whatever happens around it."""
    return 500 + (sum(map(ord, request_id)) * 31 + index * 7) % 50


@dataclass
class Scenario:
    """Traffic on a small pool.

    Attributes:
        make_config: Of the cache.
        unit: Tokens under one hash.
        num_drafts: Drafts a step; None: no drafter.
        num_loaded: Tokens that a connector offers beyond what is cached; 0: there is none.
        tenants: Who shares the cache.
        settings: Of the scheduler.
    """

    make_config: Callable[[], KVCacheConfig]
    unit: int = UNIT
    num_drafts: int | None = None
    num_loaded: int = 0
    tenants: TenantsConfig | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def make_scheduler(self) -> Scheduler:
        settings = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 3 * self.unit + 5,
            "max_model_len": 12 * self.unit,
            **self.settings,
        }
        if self.num_loaded:
            settings["kv_transfer_config"] = KVTransferConfig(
                kv_connector="LoadingConnector",
                kv_role="kv_both",
                kv_connector_module_path="tests.v1.core.sched.scripted_connector",
                kv_connector_extra_config={"matched": self.num_loaded, "is_async": True},
            )
        return make_scheduler(
            kv_cache_config=self.make_config(),
            block_size=self.unit,
            num_speculative_tokens=self.num_drafts,
            tenants=self.tenants,
            **settings,
        )

    def make_requests(self) -> list[tuple[int, Request]]:
        """Prompts that share beginnings, part, are resent and go on; each with its step."""
        unit, half = self.unit, self.unit // 2
        system = list(range(1000, 1000 + 4 * unit + unit // 2))
        other = list(range(3000, 3000 + 2 * unit + 3))
        turn = [*system, *range(3 * unit)]
        prompts: list[tuple[int, Sequence[int], int]] = [
            (0, turn, half),
            # Waits for the first one, which leaves a checkpoint where they part.
            (0, [*system, *range(7000, 7000 + unit)], half + 2),
            (0, other, unit + half),
            (3, turn, unit),
            (9, [*other, *range(50, 50 + unit)], half),
            (20, [*turn, *range(300, 300 + unit)], half),
            (21, [*system, *range(9000, 9000 + unit)], half),
            (30, turn, 4),
        ]
        return [
            (
                step,
                make_request(
                    f"r{number}",
                    prompt,
                    max_tokens,
                    block_size=unit,
                    tenant=("a", "b", None)[number % 3] if self.tenants is not None else None,
                ),
            )
            for number, (step, prompt, max_tokens) in enumerate(prompts)
        ]


@dataclass
class Run:
    """One run of a scenario, from its first step to its last; checked from the refusal on.

    Owns: the scheduler, the worker, the tokens that clients got.
    """

    scenario: Scenario
    refusals: Refusals
    tokens: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    num_loads: int = 0

    def __post_init__(self) -> None:
        self.scheduler = self.scenario.make_scheduler()
        self.manager = self.scheduler.kv_cache_manager
        # What is loaded no worker of ours has written: rows are compared where nothing is.
        self.executor = None
        if not self.scenario.num_loaded:
            config = self.manager.kv_cache_config
            self.executor = FakeExecutor(config, sample, self.manager)

    def play(self) -> None:
        """Step until all requests have ended; check after every step."""
        waiting = self.scenario.make_requests()
        for number in range(MAX_STEPS):
            while waiting and waiting[0][0] <= number:
                self.scheduler.add_request(waiting.pop(0)[1])
            if not waiting and not self.scheduler.has_requests():
                break
            self.step()
        else:
            raise AssertionError("requests do not end")
        assert all_blocks_free(self.scheduler)
        self.check()
        assert not self.scheduler._inflight_prefills
        assert len(self.manager.block_pool.claims) == 0

    def step(self) -> None:
        scheduler = self.scheduler
        output = scheduler.schedule()
        self.check()
        if self.executor is not None:
            result = self.executor.execute(output)
        else:
            result = answer(output, self.sample(output.num_scheduled_tokens))
            loads = scheduler.connector.loads
            self.num_loads += len(loads)
            result.kv_connector_output = KVConnectorOutput(finished_recving=set(loads))
            loads.clear()
        for request_id, item in outputs_by_request(
            scheduler.update_from_output(output, result)
        ).items():
            self.tokens.setdefault(request_id, []).extend(item.new_token_ids)
            if item.finish_reason is FinishReason.ERROR:
                self.refused[request_id] = str(item.stop_reason)
        if self.scenario.num_drafts:
            self.draft(list(output.num_scheduled_tokens))
        self.check()

    def sample(self, request_ids: Any) -> dict[str, list[int]]:
        requests = self.scheduler.requests
        return {
            name: [sample(name, requests[name].num_output_tokens)]
            for name in request_ids
            if not requests[name].is_prefill_chunk
        }

    def draft(self, request_ids: list[str]) -> None:
        """Propose drafts of which the last is wrong by turns."""
        drafts, alive = [], [name for name in request_ids if name in self.scheduler.requests]
        for name in alive:
            start = self.scheduler.requests[name].num_output_tokens
            proposal = [sample(name, start + i) for i in range(self.scenario.num_drafts or 0)]
            proposal[-1] += start % 2
            drafts.append(proposal)
        self.scheduler.update_draft_token_ids(DraftTokenIds(alive, drafts))

    def check(self) -> None:
        if self.refusals.count < self.refusals.fail_at:
            return  # as in the undisturbed run
        running = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}
        self.manager.check_invariants(running)
        if self.scenario.tenants is not None:
            check_owners(self.manager.block_pool)


SCENARIOS = {
    "DeepSeek-V4": Scenario(lambda: v4_config(UNIT, 112)),
    "DeepSeek-V4, drafts": Scenario(lambda: v4_config(UNIT, 112), num_drafts=3),
    "recurrent": Scenario(lambda: recurrent_config(UNIT, 50)),
    "windows and full": Scenario(lambda: window_config(16, 95, 48, GEMMA_LIKE), unit=16),
    "full alone": Scenario(lambda: window_config(16, 20, 48, LLAMA_LIKE), unit=16),
    "windows alone": Scenario(lambda: window_config(16, 26, 48, MISTRAL_LIKE), unit=16),
    "whole blocks": Scenario(lambda: full_config(20), unit=16),
    "whole blocks, hybrid": Scenario(lambda: hybrid_config(28), unit=16),
    "whole blocks, drafts": Scenario(lambda: hybrid_config(28), unit=16, num_drafts=3),
    "tenants": Scenario(
        lambda: v4_config(UNIT, 130),
        tenants=TenantsConfig.of(Tenant("a", cache_guaranteed=0.1), Tenant("b", cache_at_most=0.3)),
    ),
    "restores": Scenario(lambda: v4_config(UNIT, 112), num_loaded=2 * UNIT),
    "restores of rows": Scenario(
        lambda: window_config(16, 20, 48, LLAMA_LIKE), unit=16, num_loaded=32
    ),
    "restores, whole blocks": Scenario(lambda: hybrid_config(28), unit=16, num_loaded=32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_nth_allocation_fails(name: str) -> None:
    scenario = SCENARIOS[name]
    with refusing(0) as refusals:
        undisturbed = Run(scenario, refusals)
        undisturbed.play()
    num_allocations = refusals.count
    assert num_allocations >= 12
    assert undisturbed.num_loads >= (3 if scenario.num_loaded else 0)
    wanted = {
        request.request_id: [sample(request.request_id, i) for i in range(request.max_tokens)]
        for _, request in scenario.make_requests()
    }
    assert undisturbed.tokens == wanted
    for fail_at in range(1, num_allocations + 1):
        with refusing(fail_at) as refusals:
            run = Run(scenario, refusals)
            run.play()
        assert refusals.count > fail_at, "nobody asked again"
        assert run.refused == {}, fail_at
        assert run.tokens == wanted, fail_at
