"""Random traffic under a tiny pool: everything ends, with exactly the scripted tokens.

The executor checks every row a step reads, the manager's invariants are checked after every step.
"""

from collections import deque
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.v1.core.sched.builders import (
    all_blocks_free,
    full_config,
    hybrid_config,
    make_request,
    make_scheduler,
    outputs_by_request,
)
from tests.v1.core.sched.fake_executor import FakeExecutor
from tests.v1.core.test_shared_pool import check_owners
from tests.v1.core.v4_geometry import v4_config
from vllm.config.tenants import Tenant, TenantsConfig
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.messages import FinishReason
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

MAX_MODEL_LEN = 192
ALPHABET = 2  # few tokens: many shared prefixes


def sample(request_id: str, index: int) -> int:
    """The "model": any fixed function will do."""
    return hash((int(request_id[1:]), index)) % ALPHABET  # of ints: the same in every process


class Traffic(RuleBasedStateMachine):
    """Adds, steps, aborts and resets in any order."""

    unit = 16
    make_config = staticmethod(v4_config)
    kinds: tuple[str, ...] = ("full", "hybrid")
    depths = (1,)
    drafts = (None,)
    tenants: TenantsConfig | None = None
    num_spare_blocks = 0

    @initialize(data=st.data())
    def build(self, data: Any) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        self.depth = data.draw(st.sampled_from(self.depths))
        self.num_drafts = data.draw(st.sampled_from(self.drafts))
        if kind == "unit":
            geometry = CacheGeometry.from_config(self.make_config(self.unit, 10))
            needed = max_request_blocks(geometry, MAX_MODEL_LEN, 0)
            needed += 1 + self.num_spare_blocks
            config = self.make_config(self.unit, needed + data.draw(st.integers(0, 40)))
        else:
            make = {"full": full_config, "hybrid": hybrid_config}[kind]
            config = make(data.draw(st.integers(6, 40)))
        self.scheduler = make_scheduler(
            kv_cache_config=config,
            block_size=self.unit,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=data.draw(st.integers(1, 5)),
            max_num_batched_tokens=data.draw(st.sampled_from((8, 40, 130, 512))),
            policy=data.draw(st.sampled_from(("fcfs", "priority"))),
            long_prefill_token_threshold=data.draw(st.sampled_from((0, 20))),
            scheduler_reserve_full_isl=data.draw(st.booleans()),
            num_speculative_tokens=self.num_drafts,
            use_async=self.depth > 1,
            tenants=self.tenants,
        )
        self.executor = FakeExecutor(config, sample, self.scheduler.kv_cache_manager)
        self.requests: dict[str, Request] = {}
        self.delivered: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.refused: set[str] = set()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.steps_without_news = 0

    @rule(
        length=st.integers(1, MAX_MODEL_LEN - 2),
        first=st.integers(0, ALPHABET - 1),
        change=st.integers(0, 200),
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 2),
        tenant=st.sampled_from((None, "a", "b", "unknown")),
    )
    def add(
        self,
        length: int,
        first: int,
        change: int,
        max_tokens: int,
        priority: int,
        tenant: str | None,
    ) -> None:
        request_id = f"r{len(self.requests)}"
        prompt = [first if i < change else 1 - first for i in range(length)]
        request = make_request(
            request_id,
            prompt,
            max_tokens,
            block_size=self.unit,
            priority=priority,
            tenant=tenant,
        )
        self.requests[request_id] = request
        self.delivered[request_id] = []
        self.scheduler.add_request(request)

    @rule()
    def step(self) -> None:
        if not self.scheduler.has_requests():
            if self.in_flight:
                self.update()
            return
        output = self.scheduler.schedule()
        self.check()
        self.in_flight.append((output, self.executor.execute(output)))
        if len(self.in_flight) >= self.depth:
            self.update()

    def update(self) -> None:
        output, result = self.in_flight.popleft()
        news = outputs_by_request(self.scheduler.update_from_output(output, result))
        for request_id, item in news.items():
            assert request_id not in self.aborted
            self.delivered[request_id] += item.new_token_ids
            if item.finish_reason is FinishReason.ERROR:
                assert "KV cache" in str(item.stop_reason)
                self.refused.add(request_id)
        if self.num_drafts and self.depth == 1:
            self.draft(output)
        progress = output.total_num_scheduled_tokens > 0 or news
        self.steps_without_news = 0 if progress else self.steps_without_news + 1
        assert self.steps_without_news <= 2 + self.depth, "wedged"
        self.check()

    def draft(self, output: SchedulerOutput) -> None:
        """Propose drafts that are right, half right or wrong, by turns."""
        ids, drafts = [], []
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            start = request.num_output_tokens
            proposal = [sample(request_id, start + i) for i in range(self.num_drafts or 0)]
            if start % 3:
                proposal[start % len(proposal)] ^= 1
            ids.append(request_id)
            drafts.append(proposal)
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        ended = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if ended:
            self.aborted.add(request_id)
        self.check()

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.scheduler.kv_cache_manager.new_step_starts()
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running)
        assert done or not running
        if running:
            self.forget_in_flight()
        self.check()

    def forget_in_flight(self) -> None:
        """Make the executor forget tokens that the scheduler will discard."""
        for request_id, state in self.executor.requests.items():
            request = self.requests[request_id]
            if not request.is_finished():
                del state.tokens[request.num_tokens :]

    def check(self) -> None:
        scheduler = self.scheduler
        running = {r.request_id: r.num_computed_tokens for r in scheduler.running}
        scheduler.kv_cache_manager.check_invariants(running)
        queued = [*scheduler.waiting, *scheduler.skipped_waiting, *scheduler.running]
        assert len({r.request_id for r in queued}) == len(queued)
        assert {r.request_id for r in queued} == set(scheduler.requests)
        for request in queued:
            assert request.num_computed_tokens >= 0
            assert request.num_output_placeholders >= 0

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.scheduler.has_requests() and not self.in_flight:
                break
            self.step()
        assert not self.scheduler.has_requests(), "requests do not finish"
        for request_id, request in self.requests.items():
            tokens = self.delivered[request_id]
            assert tokens == [sample(request_id, i) for i in range(len(tokens))], request_id
            if request_id in self.refused:
                assert not self.scheduler.kv_cache_manager.can_ever_fit(request)
            elif request_id not in self.aborted:
                limit = min(request.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens)
                assert len(tokens) == limit
        assert all_blocks_free(self.scheduler)
        assert not self.scheduler._inflight_prefills
        self.scheduler.shutdown()


class SpeculativeTraffic(Traffic):
    """With drafts that are sometimes rejected."""

    drafts = (1, 3)


class AsyncTraffic(Traffic):
    """With the scheduler a step or two ahead."""

    depths = (2, 3)


class UnitTraffic(Traffic):
    """With hits at one unit and block copies."""

    unit = 32
    kinds = ("unit",)


class UnitAsyncTraffic(UnitTraffic):
    """Both."""

    depths = (2,)


class UnitSpeculativeTraffic(UnitTraffic):
    """Drafts over the unit manager: nothing is published beyond accepted tokens."""

    drafts = (1, 3)


class TenantTraffic(UnitTraffic):
    """With tenants that share it fairly: the same answers, and nobody waits for ever."""

    num_spare_blocks = 40
    tenants = TenantsConfig.of(
        Tenant("a", 3.0, cache_guaranteed=0.2), Tenant("b", priority=1, cache_at_most=0.4)
    )

    def check(self) -> None:
        super().check()
        check_owners(self.scheduler.kv_cache_manager.block_pool)


class TenantAsyncTraffic(TenantTraffic):
    """The same, a step ahead."""

    depths = (2,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (Traffic, 60),
        (SpeculativeTraffic, 40),
        (AsyncTraffic, 60),
        (UnitTraffic, 25),
        (UnitAsyncTraffic, 15),
        (UnitSpeculativeTraffic, 15),
        (TenantTraffic, 25),
        (TenantAsyncTraffic, 15),
    ],
)
def test_traffic(machine: type[Traffic], examples: int) -> None:
    run_traffic(machine, examples)


def run_traffic(machine: type[Traffic], examples: int) -> None:
    """Run a machine on random traffic, the same in every run."""
    case = machine.TestCase()
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        report_multiple_bugs=False,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case.runTest()
