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
from tests.v1.core.sched.fake_executor import FakeExecutor, tags_of
from tests.v1.core.test_shared_pool import check_owners
from tests.v1.core.v4_geometry import v4_config
from vllm.config import KVTransferConfig
from vllm.config.tenants import Tenant, TenantsConfig
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.step_ahead import StepAhead
from vllm.v1.messages import EngineCoreOutput, FinishReason
from vllm.v1.outputs import DraftTokenIds, FinishedStep, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

MAX_MODEL_LEN = 192
ALPHABET = 2  # few tokens: many shared prefixes


def sample(request_id: str, index: int) -> int:
    """The "model": any fixed function will do."""
    return hash((int(request_id[1:]), index)) % ALPHABET  # of ints: the same in every process


def holds_loaded(scheduler: Scheduler) -> bool:
    """Whether requests that do not run hold blocks: a transfer writes them, or has."""
    return any(
        request.is_finished() or request.num_computed_tokens > 0
        for request in scheduler.requests.values()
        if request.status is not RequestStatus.RUNNING
    )


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
            joint_prompt_tokens=data.draw(st.sampled_from((None, 12, 60))),
            scheduler_reserve_full_isl=data.draw(st.booleans()),
            num_speculative_tokens=self.num_drafts,
            use_async=self.depth > 1,
            tenants=self.tenants,
            **self.draw_settings(data),
        )
        self.executor = FakeExecutor(config, sample, self.scheduler.kv_cache_manager)
        self.requests: dict[str, Request] = {}
        self.delivered: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.refused: set[str] = set()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.steps_without_news = 0

    def draw_settings(self, data: Any) -> dict[str, Any]:
        """Return further settings of the scheduler."""
        return {}

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
        self.deliver(news)
        if self.num_drafts and self.depth == 1:
            self.draft(output)
        progress = output.total_num_scheduled_tokens > 0 or news
        self.steps_without_news = 0 if progress else self.steps_without_news + 1
        assert self.steps_without_news <= 2 + self.depth, "wedged"
        self.check()

    def deliver(self, news: dict[str, EngineCoreOutput]) -> None:
        """Take what clients are told."""
        for request_id, item in news.items():
            assert request_id not in self.aborted
            self.delivered[request_id] += item.new_token_ids
            if item.finish_reason is FinishReason.ERROR:
                self.note_error(request_id, str(item.stop_reason))

    def note_error(self, request_id: str, reason: str) -> None:
        """Take note of a request that ended with an error."""
        assert "KV cache" in reason
        self.refused.add(request_id)

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
        assert done or not running or holds_loaded(self.scheduler)
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
        # Of those that ended, whose blocks a transfer still writes.
        alive = {name for name, r in scheduler.requests.items() if not r.is_finished()}
        assert {r.request_id for r in queued} == alive
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


class LoadingTraffic(Traffic):
    """An engine's steps ahead, with prefixes that a connector loads, in the step or beside it.

    Loads fail by turns; then the rows that are wrong are forgotten, and no step may read them.
    """

    kinds = ("full",)
    depths = (2,)

    def draw_settings(self, data: Any) -> dict[str, Any]:
        self.recomputes = data.draw(st.booleans())
        return {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="LoadingConnector",
                kv_role="kv_both",
                kv_connector_module_path="tests.v1.core.sched.scripted_connector",
                kv_load_failure_policy="recompute" if self.recomputes else "fail",
            )
        }

    @initialize(data=st.data())
    def build(self, data: Any) -> None:
        super().build(data)
        self.ahead = StepAhead(self.scheduler, self)  # type: ignore[arg-type]
        # Beside the steps: tokens by request; and how those ended that nobody was told of.
        self.loading: dict[str, int] = {}
        self.ended: list[tuple[str, set[int]]] = []
        self.fails_next = False
        self.failed: set[str] = set()

    @rule(matched=st.integers(0, 6), is_async=st.booleans(), fails=st.booleans())
    def offer(self, matched: int, is_async: bool, fails: bool) -> None:
        """Let the connector have something else to load from now on."""
        connector = self.scheduler.connector
        connector.matched, connector.is_async = matched * self.unit, is_async
        self.fails_next = fails

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), fails=st.booleans())
    def arrive(self, data: Any, fails: bool) -> None:
        """End a load beside the steps."""
        request_id = data.draw(st.sampled_from(sorted(self.loading)))
        num_tokens, request = self.loading.pop(request_id), self.requests[request_id]
        end = request.num_computed_tokens
        self.fill(request, end - num_tokens, end)
        bad = self.pick_bad(request_id, end - num_tokens) if fails else set()
        self.forget_rows(bad)
        self.ended.append((request_id, bad))

    def fill(self, request: Request, start: int, end: int) -> None:
        """Write rows that are loaded."""
        tables = [
            list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        ]
        self.executor.pages.write(tables, tags_of(list(request.all_token_ids)), start, end)

    def pick_bad(self, request_id: str, start: int) -> set[int]:
        (table, *_) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return {table[start // self.unit]}

    def forget_rows(self, bad: set[int]) -> None:
        """Forget what lies in bad blocks, and what was computed from it."""
        manager = self.scheduler.kv_cache_manager
        for request in self.scheduler.requests.values():
            (table, *_) = manager.get_block_ids(request.request_id) or ([],)
            first = next((i for i, block_id in enumerate(table) if block_id in bad), len(table))
            for block_id in table[first:]:
                self.executor.pages.forget(block_id)

    def begin_model(self, plan: SchedulerOutput) -> FinishedStep:
        """Run a step, as an executor would."""
        loads, bad = self.scheduler.connector.loads, set()
        for request_id, (num_tokens, is_async) in loads.items():
            request = self.requests[request_id]
            if is_async:
                self.loading[request_id] = num_tokens
                continue
            assert plan.loads_within
            # It is counted as scheduled already.
            end = request.num_computed_tokens - plan.num_scheduled_tokens[request_id]
            self.fill(request, end - num_tokens, end)
            if self.fails_next:
                bad |= self.pick_bad(request_id, end - num_tokens)
        loads.clear()
        result = self.executor.execute(plan)
        self.forget_rows(bad)
        ended, self.ended = self.ended, []
        result.kv_connector_output = KVConnectorOutput(
            finished_recving={request_id for request_id, _ in ended},
            invalid_block_ids=bad.union(*(blocks for _, blocks in ended)),
        )
        return FinishedStep(result)

    @rule()
    def step(self) -> None:
        if not self.scheduler.has_requests() and not self.ahead.is_in_flight:
            return
        untold = self.ahead.take_untold()
        if untold is not None:
            # As over a socket: who has left since passes over it.
            news = outputs_by_request(untold).items()
            self.deliver({name: item for name, item in news if name not in self.aborted})
        else:
            settled = self.ahead.settle_if_needed()
            plan = self.scheduler.schedule()
            self.check()
            outputs = self.ahead.begin(plan, settled)
            if plan.loads_within:
                self.forget_void()
            self.deliver(outputs_by_request(outputs))
        self.check()

    def forget_void(self) -> None:
        """Make the executor forget what came of void steps; none is in flight."""
        for request in self.scheduler.running:
            state = self.executor.requests.get(request.request_id)
            if state is not None:
                del state.tokens[request.num_tokens :]
                state.num_computed = request.num_computed_tokens

    def note_error(self, request_id: str, reason: str) -> None:
        if "failed to load" in reason:
            assert not self.recomputes
            self.failed.add(request_id)
            self.aborted.add(request_id)
            return
        super().note_error(request_id, reason)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.scheduler.has_requests() and not self.ahead.is_in_flight:
                break
            self.ended += [(request_id, set()) for request_id in self.loading]
            for request_id, num_tokens in self.loading.items():
                request = self.requests[request_id]
                self.fill(
                    request, request.num_computed_tokens - num_tokens, request.num_computed_tokens
                )
            self.loading.clear()
            self.step()
        super().teardown()


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
        (LoadingTraffic, 30),
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
