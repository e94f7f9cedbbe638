"""The engine core: scheduler and executor, stepped together."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm import envs
from vllm.cachelab.view.view import CacheView
from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventPublisherFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.exceptions import InvariantError, VllmError
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges, count_unused_blocks
from vllm.v1.engine.kv_cache_setup import KVCachePlan, describe_kv_cache, plan_kv_cache
from vllm.v1.engine.questions import answer_message
from vllm.v1.engine.scheduler_choice import make_scheduler
from vllm.v1.engine.startup_report import report_model, report_start
from vllm.v1.engine.step_ahead import StepAhead
from vllm.v1.engine.wire import Answer, Ask, CoreStatus, KVCacheInfo
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)

_TRANSFER_POLL_S = 0.005
# With nothing but waiting requests, a step is tried again after this long.
_POLL_S = 0.002
# The same where whatever they wait for calls the loop: deadlines alone are left to look at.
_WOKEN_WAIT_S = 0.1


class EngineCore:
    """Owns: the scheduler, the executor, the KV cache plan.

    Not thread-safe, :meth:`make_request` excepted.

    Args:
        vllm_config: Resolved, except for what only profiling can tell.
        executor_class: Makes the executor with its model loaded.

    Raises:
        ConfigError: The KV cache does not fit.
        CheckpointError: The weights do not fit the model.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: Callable[[VllmConfig], Executor]
    ) -> None:
        report_model(vllm_config)
        # A taken address must show before the minutes that weights can take.
        KVConnectorFactory.check_before_load(vllm_config)
        publisher = EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_index
        )
        self._changes: CacheChanges | None = None
        if vllm_config.parallel_config.data_parallel_size > 1:
            publisher = self._changes = CacheChanges(publisher)
        started = time.monotonic()
        try:
            self.executor = executor_class(vllm_config)
        except BaseException:
            publisher.shutdown()
            raise
        self.load_s = time.monotonic() - started
        try:
            plan = self._set_up_kv_cache(vllm_config)
            self.kv_cache_info = describe_kv_cache(vllm_config, plan)
            self._grammars = StructuredOutputManager(vllm_config)
            self.scheduler: Scheduler = make_scheduler(
                vllm_config,
                plan,
                structured_output_manager=self._grammars,
                log_stats=vllm_config.observability_config.log_stats,
                kv_event_publisher=publisher,
            )
        except BaseException:
            publisher.shutdown()
            self.executor.shutdown()
            raise
        self._block_hasher = _make_block_hasher(vllm_config, plan.unit)
        self._refusals: list[tuple[str, VllmError]] = []
        self._ahead: StepAhead | None = None
        if isinstance(self.scheduler, AsyncScheduler):
            self._ahead = StepAhead(self.scheduler, self.executor)
        self._drafts = vllm_config.speculative_config is not None
        self._is_in_step = False
        self._is_woken = False
        self._publish: Callable[[], None] = _tell_nobody
        self._checks_invariants = envs.VLLM_CHECK_INVARIANTS
        self._view = CacheView(self.scheduler) if envs.VLLM_SERVER_DEV_MODE else None
        report_start(vllm_config, self.kv_cache_info, self.load_s)

    def _set_up_kv_cache(self, vllm_config: VllmConfig) -> KVCachePlan:
        plan = plan_kv_cache(
            vllm_config,
            self.executor.get_kv_cache_specs(),
            self.executor.determine_available_memory(),
        )
        self.executor.initialize_from_config(plan.worker_configs)
        return plan

    # ---- requests ----------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start what compiles grammars, beside the loop."""
        if envs.VLLM_WARM_GRAMMARS:
            self._grammars.warm_up()

    def make_request(self, request: EngineCoreRequest) -> Request:
        """Build the scheduler's request and hash its prompt; any thread may call this."""
        return Request.from_engine_core_request(request, self._block_hasher)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserInputError: It can never be served.
        """
        self.scheduler.add_request(request)
        if request.use_structured_output:
            self._grammars.start(request)

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when what runs beside the steps has got on."""
        connector = self.scheduler.connector
        tells = connector is not None and connector.bind_wake(wake)
        self._is_woken = self.executor.bind_wake(wake) and tells

    def bind_updates(self, tell: Callable[[], None]) -> None:
        """Have ``tell`` called, in the step's thread, when front ends must hear of the cache."""
        self._publish = tell

    def find_wait_s(self) -> float:
        """Return for how long nothing need be looked at, after a step that found nothing to do."""
        if self._is_woken and not self._grammars.is_compiling:
            return _WOKEN_WAIT_S
        return _POLL_S

    def take_refusals(self) -> list[tuple[str, VllmError]]:
        """Drain the requests that turned out to be wrong, and what is wrong with them."""
        refusals, self._refusals = self._refusals, []
        return refusals + self._grammars.take_contradictions()

    def take_status(self) -> CoreStatus | None:
        """Drain what front ends must hear to share requests out; None: there is nothing new."""
        if self._changes is None:
            return None
        connector = self.scheduler.connector
        kept = None if connector is None else connector.hooks.take_kept()
        if kept is not None:
            self._changes.note_kept(kept)
        num_running, num_waiting = self.scheduler.get_request_counts()
        unused = count_unused_blocks(self.scheduler.kv_cache_manager.block_pool)
        return self._changes.take(num_running, num_waiting, unused)

    def tell_all(self) -> None:
        """Let the next status say all there is."""
        if self._changes is not None:
            self._changes.tell_all()

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests and free their blocks; unknown and finished ones are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def withdraw_prefixes(self, names: list[str]) -> None:
        """Let go of what is held for other engines, by name; unknown names are ignored."""
        if self.scheduler.connector is not None:
            self.scheduler.connector.hooks.withdraw(names)

    # ---- steps -------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether requests wait or run, or workers must still hear of finished ones."""
        is_ahead = self._ahead is not None and self._ahead.is_in_flight
        return is_ahead or self.scheduler.has_requests()

    def step(self) -> tuple[Mapping[int, EngineCoreOutputs], bool]:
        """Schedule, execute, take the results.

        Returns:
            Outputs by client, and whether the step did anything (a request can be waiting for
            something that is not there yet).
        """
        if not self.has_work():
            self.check_invariants()
            return {}, False
        self._is_in_step = True
        outputs, has_orders = self._run_step()
        self._is_in_step = False
        return outputs, has_orders

    def _run_step(self) -> tuple[Mapping[int, EngineCoreOutputs], bool]:
        self._settle_grammars()
        settled = None
        if self._ahead is not None:
            untold = self._ahead.take_untold()
            if untold is not None:
                return untold, True
            settled = self._ahead.settle_if_needed()
        plan = self.scheduler.schedule()
        if self._changes is not None and self._changes.has_moved:
            # Before the step runs: who is sent here meanwhile is told what is gone, and how far
            # others will have come when he gets his turn.
            self._publish()
        if self._view is not None:
            self._view.note_step(plan)
        plan.grammar_masks = self.scheduler.get_grammar_bitmask(plan)
        has_orders = plan.has_orders
        # Without tokens too: workers must hear of finished requests and run block copies.
        outputs: Mapping[int, EngineCoreOutputs]
        if self._ahead is not None:
            has_orders |= settled is not None or self._ahead.is_in_flight
            outputs = self._ahead.begin(plan, settled)
            self.check_invariants()
            return outputs, has_orders
        result = self.executor.execute_model(plan)
        outputs = self.scheduler.update_from_output(plan, result)
        if self._drafts:
            drafts = self.executor.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)
        self.check_invariants()
        return outputs, has_orders

    def _settle_grammars(self) -> None:
        """Let requests go on whose grammars are ready; end those that can have none."""
        refused = self._grammars.settle()
        if refused:
            ids = [request_id for request_id, _ in refused]
            self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ERROR)
            self._refusals += refused

    def check_invariants(self) -> None:
        """Check the KV cache under ``VLLM_CHECK_INVARIANTS=1``.

        Raises:
            InvariantError: An invariant does not hold.
        """
        if self._checks_invariants:
            self.scheduler.kv_cache_manager.check_invariants()

    # ---- the rest ----------------------------------------------------------------------------

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached prefix; False, with nothing forgotten, while blocks are in use."""
        done = self.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
        # Now: an idle core may not step for hours, and routers would keep a stale view.
        self.scheduler.publish_kv_events()
        self.check_invariants()
        return done

    def answer(self, message: Ask, tell: Callable[[Answer], None]) -> None:
        """Answer a question, now or in a later step."""
        answer_message(message, self, tell)
        # It may have changed the cache, and an idle core may not step for hours.
        self.scheduler.publish_kv_events()
        self.check_invariants()

    def get_cache_view(self) -> CacheView:
        """Return what draws the cache.

        What was used when is noted from the first call on, in development mode from the start.
        """
        if self._view is None:
            self._view = CacheView(self.scheduler)
        return self._view

    def get_kv_cache_info(self) -> KVCacheInfo:
        """Return the size and geometry of the KV cache."""
        return self.kv_cache_info

    def find_fault(self) -> str | None:
        """Return what is wrong with the workers; None: nothing. Any thread may ask."""
        return self.executor.find_fault()

    def describe_state(self) -> str:
        """Say what the core was at, for the log of its death."""
        num_running, num_waiting = self.scheduler.get_request_counts()
        usage = self.scheduler.kv_cache_manager.usage
        state = f"{num_running} requests ran, {num_waiting} waited, KV cache usage {usage:.1%}"
        try:
            self.scheduler.kv_cache_manager.check_invariants()
        except InvariantError as error:
            return f"{state}; broken invariant: {error}"
        return state

    def _finish_transfers(self) -> None:
        """Go on for a while as long as other engines fetch what is held for them."""
        connector = self.scheduler.connector
        # A core that failed in a step takes no further one.
        has_failed = self._is_in_step or (self._ahead is not None and self._ahead.has_failed)
        if connector is None or has_failed:
            return
        connector.hooks.begin_drain()
        deadline = time.monotonic() + connector.hooks.drain_timeout_s
        while connector.hooks.has_pending_work() and time.monotonic() < deadline:
            self.step()
            time.sleep(_TRANSFER_POLL_S)

    def shutdown(self) -> None:
        """Stop the scheduler's helpers and release the device."""
        try:
            self._finish_transfers()
        finally:
            self._grammars.shutdown()
            self.scheduler.shutdown()
            self.executor.shutdown()


def _tell_nobody() -> None:
    """Nobody has asked for updates yet."""


def _make_block_hasher(vllm_config: VllmConfig, unit: int) -> Callable[[Request], Any] | None:
    # A trace of an engine without a cache says what one would have hit.
    is_traced = vllm_config.observability_config.cache_trace is not None
    caches = vllm_config.cache_config.enable_prefix_caching or vllm_config.kv_transfer_config
    if not (caches or is_traced):
        return None
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn, vllm_config.cache_config.prefix_hash_seed)
    return get_request_block_hasher(unit, hash_fn)
