"""A load through several simulated engine cores, with the server's own routing in front of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.cachelab.sim.clock import Ledger, LoadRequest, SimResult
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import Acceptance, SimEngine
from vllm.cachelab.sim.settings import SimSettings
from vllm.config.parallel import ParallelConfig
from vllm.distributed.kv_events import NullEventPublisher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges, count_unused_blocks
from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.kv_cache_setup import describe_kv_cache
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.request import Request


@dataclass(slots=True)
class _Core:
    """One engine, what it tells of its cache, and the step it runs."""

    engine: SimEngine
    changes: CacheChanges
    step: SchedulerOutput | None = None
    step_ends_s: float = field(default=0.0)


class SimCores:
    """Engines side by side, each with a pool of its own and a clock in common.

    Owns: the engines and the router.

    Args:
        settings: Of each engine.
        parallel: How many there are, and how requests are shared out.
        acceptance: Of drafts.
        decode_stride: Tokens a decode step brings.
    """

    def __init__(
        self,
        settings: SimSettings,
        parallel: ParallelConfig,
        acceptance: Acceptance | None = None,
        decode_stride: int = 1,
    ) -> None:
        self._cores = []
        for _ in range(parallel.data_parallel_size):
            changes = CacheChanges(NullEventPublisher())
            self._cores.append(
                _Core(SimEngine(settings, acceptance, decode_stride, changes), changes)
            )
        config = settings.make_config()
        config.parallel_config = parallel
        info = describe_kv_cache(config, self._cores[0].engine.plan)
        self._router = Router(RouterSettings.from_config(config, info))

    @property
    def hash_unit(self) -> int:
        """Tokens under one prefix hash."""
        return self._cores[0].engine.hash_unit

    def run(
        self,
        requests: Sequence[LoadRequest],
        cost: CostModel,
        max_concurrency: int | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> SimResult:
        """Serve all requests to their ends; see ``ClockedRun``."""
        ledger = Ledger(max_concurrency, on_done)
        ledger.expect(requests)
        now = 0.0
        while True:
            for request in ledger.take_due(now):
                self._add(request.make())
            self._start_steps(now, cost, ledger.result)
            moments = [core.step_ends_s for core in self._cores if core.step is not None]
            arrival = ledger.next_arrival_s()
            if arrival is not None and ledger.has_room():
                moments.append(arrival)
            if not moments:
                break
            now = max(now, min(moments))
            for rank, core in enumerate(self._cores):
                if core.step is not None and core.step_ends_s <= now:
                    self._finish_step(rank, core, ledger)
        ledger.result.duration_s = now
        ledger.result.num_preemptions = sum(core.engine.num_preemptions for core in self._cores)
        return ledger.result

    def _add(self, request: Request) -> None:
        assert request.sampling_params is not None
        rank = self._router.route(
            EngineCoreRequest(
                request.request_id,
                request.prompt_token_ids or [],
                request.sampling_params,
                request.arrival_time,
                block_hashes=list(request.block_hashes),
            )
        )
        self._cores[rank].engine.add(request)

    def _start_steps(self, now: float, cost: CostModel, result: SimResult) -> None:
        for core in self._cores:
            if core.step is None and core.engine.has_work():
                core.step, shape = core.engine.schedule()
                computes = bool(core.step.total_num_scheduled_tokens)
                result.num_steps += computes
                core.step_ends_s = now + (cost.seconds(shape) if computes else 0.0)

    def _finish_step(self, rank: int, core: _Core, ledger: Ledger) -> None:
        assert core.step is not None
        outputs = core.engine.finish(core.step)
        core.step = None
        scheduler = core.engine.scheduler
        unused = count_unused_blocks(scheduler.kv_cache_manager.block_pool)
        changes = core.changes.take(*scheduler.get_request_counts(), unused)
        if changes is not None:
            self._router.observe(rank, changes)
        self._router.take_step(outputs)
        for output in outputs:
            ledger.take(output, core.step_ends_s)
