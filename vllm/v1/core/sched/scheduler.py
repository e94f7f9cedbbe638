"""The scheduler: what each step computes, and what its tokens change.

There is no prefill and no decode phase. A request has ``num_computed_tokens`` and ``num_tokens``;
a step moves the first toward the second, as far as the token budget and the KV pool allow. That
one rule gives chunked prefill, prefix hits, speculative decoding and preemption by recompute.

``schedule()`` has two passes over one StepPlan: running requests first (``running_pass``), then,
if nobody was preempted, waiting ones (``admission``). ``update_from_output()`` has one
(``update_pass``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from vllm import envs
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    compute_mm_encoder_budget,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.prefix.drafter_rows import StaleRow
from vllm.v1.core.sched.admission import AdmissionPass
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.kv_transfer_updates import finish_loading
from vllm.v1.core.sched.limits import SchedulerLimits
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.core.sched.running_pass import RunningPass
from vllm.v1.core.sched.step_plan import StepPlan
from vllm.v1.core.sched.update_pass import UpdatePass, make_output
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.messages import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.messages import PrefillStats
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager

__all__ = ["Scheduler", "SchedulerOutput"]

logger = init_logger(__name__)

# States in which a request waits for something other than room.
_BLOCKED = frozenset(
    {
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    }
)


class Scheduler(SchedulerInterface):
    """Synchronous scheduler.

    Owns: the requests and all their fields, the queues, the running list, the KV manager, the
    statistics since the last report.

    Attributes:
        requests: Every request that is alive, or ended with blocks still held for a transfer.
        waiting: Requests that wait for room.
        skipped_waiting: Requests that wait for something else; they came before ``waiting``.
        running: Requests with blocks, in the order they are scheduled.
        finished_req_ids: Requests that ended since the last step, for the workers.
        finished_req_ids_dict: The same by client; None unless clients want to know.
        finished_recving_kv_req_ids: Requests whose KV has arrived from the connector.
        failed_recving_kv_req_ids: Requests of which some KV did not arrive.

    Args:
        vllm_config: All configuration.
        kv_cache_config: Groups and size of the KV cache.
        structured_output_manager: Knows whose grammar must advance.
        block_size: Scheduler block size in tokens.
        hash_block_size: Tokens under one prefix hash; None: ``block_size``.
        mm_registry: Sizes of multimodal items; text models need none.
        include_finished_set: Whether outputs list the requests that ended.
        log_stats: Whether statistics and events are gathered.
        kv_event_publisher: Takes the KV events, and is shut down with the scheduler; None: one is
            made from the configuration.
    """

    # Read in steps of schedulers that tests build without __init__ (facts of the interface).
    log_stats: bool = False
    ec_connector: Any = None
    _refused: ClassVar[Any] = ()

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
        kv_event_publisher: EventPublisher | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.limits = SchedulerLimits.from_config(vllm_config)
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager = structured_output_manager
        self.block_size = block_size
        self.log_stats = log_stats
        self.max_model_len = vllm_config.model_config.max_model_len
        self.is_encoder_decoder = vllm_config.model_config.is_encoder_decoder

        self.requests: dict[str, Request] = {}
        self.waiting: RequestQueue = create_request_queue(self.limits.policy)
        self.skipped_waiting: RequestQueue = create_request_queue(self.limits.policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.finished_req_ids_dict: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        self._refused: list[tuple[int, EngineCoreOutput]] = []  # type: ignore[misc]
        self._previous_step: set[str] = set()
        self._checks_invariants = envs.VLLM_CHECK_INVARIANTS
        # Admitted requests whose prompt is not computed yet, loading ones included.
        self._inflight_prefills: set[Request] = set()

        self._prefix_cache_stats = PrefixCacheStats()
        self.kv_cache_manager = self._make_kv_cache_manager(hash_block_size or block_size)
        self._init_encoder(mm_registry)
        self._init_connectors()
        self.kv_event_publisher = kv_event_publisher or EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_index
        )

    def _make_kv_cache_manager(self, hash_block_size: int) -> KVCacheManager:
        config = self.vllm_config
        observability = config.observability_config
        events_config = config.kv_events_config
        collector = None
        if observability.kv_cache_metrics:
            collector = KVCacheMetricsCollector(observability.kv_cache_metrics_sample)
        return KVCacheManager(
            kv_cache_config=self.kv_cache_config,
            max_model_len=self.max_model_len,
            scheduler_block_size=self.block_size,
            hash_block_size=hash_block_size,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            enable_caching=config.cache_config.enable_prefix_caching,
            use_eagle=self.limits.use_eagle,
            # A manager counts lookups, and a request that finds no room is looked up again every
            # step. Admissions are counted here: see _record_admission.
            log_stats=False,
            enable_kv_cache_events=(
                events_config is not None and events_config.enable_kv_cache_events
            ),
            dcp_world_size=config.parallel_config.decode_context_parallel_size,
            pcp_world_size=config.parallel_config.prefill_context_parallel_size,
            metrics_collector=collector,
            num_lookahead_tokens=self.limits.num_lookahead_tokens,
            stale_row=StaleRow(self.limits.stale_row),
        )

    def _init_encoder(self, mm_registry: Any) -> None:
        """Build the encoder cache; text models get one without room."""
        model_config = self.vllm_config.model_config
        sizes = {}
        if model_config.is_multimodal_model and mm_registry is not None:
            sizes = mm_registry.get_max_tokens_per_item_by_modality(model_config)
        compute_budget, cache_size = compute_mm_encoder_budget(
            self.vllm_config.scheduler_config, sizes
        )
        self.max_num_encoder_input_tokens = compute_budget
        self.encoder_cache_manager: EncoderCacheManager | EncoderDecoderCacheManager = (
            EncoderDecoderCacheManager(cache_size)
            if self.is_encoder_decoder
            else EncoderCacheManager(cache_size)
        )

    def _init_connectors(self) -> None:
        self.connector: Any = None
        self.connector_prefix_cache_stats: PrefixCacheStats | None = None
        self.finished_recving_kv_req_ids: set[str] = set()
        self.failed_recving_kv_req_ids: set[str] = set()
        self.recompute_kv_load_failures = False
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector is not None:
            self.connector = KVConnectorFactory.create_connector(
                self.vllm_config, KVConnectorRole.SCHEDULER, self.kv_cache_config
            )
            self.connector.bind_gpu_block_pool(self.kv_cache_manager.block_pool)
            self.recompute_kv_load_failures = transfer.kv_load_failure_policy == "recompute"
            if self.log_stats:
                self.connector_prefix_cache_stats = PrefixCacheStats()
        self.ec_connector = None
        ec_transfer = self.vllm_config.ec_transfer_config
        if ec_transfer is not None and ec_transfer.ec_connector is not None:
            self.ec_connector = ECConnectorFactory.create_connector(
                self.vllm_config, ECConnectorRole.SCHEDULER
            )

    # ================================================================= requests

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self._enqueue(request)
        if self.connector is not None:
            self.connector.on_new_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def _enqueue(self, request: Request) -> None:
        queue = self.skipped_waiting if request.status in _BLOCKED else self.waiting
        queue.add_request(request)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests wait or run."""
        return len(self.waiting) + len(self.skipped_waiting) + len(self.running)

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many requests run and how many wait."""
        return len(self.running), len(self.waiting) + len(self.skipped_waiting)

    def has_finished_requests(self) -> bool:
        """Whether ended requests must still be told to the workers or clients, or cleaned up."""
        if self.finished_req_ids or self._refused:
            return True
        if self.connector is None:
            return False
        return any(request.is_finished() for request in self.requests.values())

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[tuple[str, int]]:
        """End requests from outside the model, such as by an abort.

        Args:
            request_ids: One, several or all (None) requests; unknown and ended ones are ignored.
            finished_status: How they end.

        Returns:
            (request id, client) of those that were alive.
        """
        assert RequestStatus.is_finished(finished_status)
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ended = []
        for request_id in dict.fromkeys(request_ids):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                ended.append(request)
        self._remove_from_queues(ended)
        for request in ended:
            # A connector may still write into the blocks of a loading request.
            is_loading = (
                request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id not in self.finished_recving_kv_req_ids
            )
            self.finished_recving_kv_req_ids.discard(request.request_id)
            self.failed_recving_kv_req_ids.discard(request.request_id)
            request.finish(finished_status)
            self._free_request(request, delay_free_blocks=is_loading)
        return [(request.request_id, request.client_index) for request in ended]

    def _remove_from_queues(self, requests: list[Request]) -> None:
        running = {r for r in requests if r.status is RequestStatus.RUNNING}
        if running:
            self.running = [r for r in self.running if r not in running]
        queued = [r for r in requests if r not in running]
        if queued:
            self.waiting.remove_requests(queued)
            self.skipped_waiting.remove_requests(queued)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> dict[str, Any] | None:
        """Let go of an ended request.

        Args:
            request: The request, its status an end.
            delay_free_blocks: Whether a transfer into its blocks is under way.

        Returns:
            What the connector wants the client to know.
        """
        assert request.is_finished()
        keeps_blocks, kv_transfer_params = self._tell_connector(request)
        self.encoder_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        self.finished_req_ids.add(request.request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request.request_id)
        if not keeps_blocks and not delay_free_blocks:
            self._free_blocks(request)
        return kv_transfer_params

    def _tell_connector(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the connector keeps the request's blocks, and its message."""
        if self.connector is None:
            return False, None
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        if isinstance(self.connector, SupportsHMA):
            return self.connector.request_finished_all_groups(request, block_ids)
        keeps, params = self.connector.request_finished(request, block_ids[0] if block_ids else [])
        return bool(keeps), params

    def _free_blocks(self, request: Request) -> None:
        assert request.is_finished()
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]

    def _refuse(self, request: Request, reason: str | None = None) -> None:
        """End a request that is in no queue with an error the client is told at the next update."""
        if reason is None:
            num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
            reason = (
                f"The request can never run: its {request.num_prompt_tokens} prompt tokens and up "
                f"to {request.max_tokens} output tokens do not fit in the KV cache of "
                f"{num_blocks} blocks. Shorten the prompt or max_tokens, or give the server more "
                "KV cache memory."
            )
        logger.warning("Request %s is refused: %s", request.request_id, reason)
        request.finish(RequestStatus.FINISHED_ERROR, stop_reason=reason)
        self._free_request(request)
        self._refused.append((request.client_index, make_output(request, [])))

    def _refuse_all(self, request_ids: list[str], reason: str) -> None:
        """End requests in whatever state with an error."""
        requests = [self.requests[request_id] for request_id in request_ids]
        self._remove_from_queues(requests)
        for request in requests:
            self.finished_recving_kv_req_ids.discard(request.request_id)
            self._refuse(request, reason)

    # ================================================================= schedule

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; requests advance as if it had run."""
        self.kv_cache_manager.new_step_starts()
        plan = StepPlan(self.limits.max_num_tokens, self.max_num_encoder_input_tokens)
        encoder = EncoderPlanner(
            cache=self.encoder_cache_manager,
            ec_connector=self.ec_connector,
            is_encoder_decoder=self.is_encoder_decoder,
            disable_chunked_mm_input=self.limits.disable_chunked_mm_input,
            shift=1 if self.limits.use_eagle else 0,
        )
        RunningPass(self, plan, encoder).run()
        # Room that preemption made belongs to those who run: admitting now would thrash.
        if not plan.preempted and not plan.holds_admission:
            AdmissionPass(self, plan, encoder).run()
        assert plan.token_budget >= 0
        assert len(self.running) <= self.limits.max_num_seqs
        # All is allocated: from here on later steps may hit what this one computes.
        self.kv_cache_manager.commit_step()
        output = self._make_scheduler_output(plan)
        self._update_after_schedule(output)
        self.publish_kv_events()
        if self._checks_invariants:
            self.kv_cache_manager.check_invariants(
                {request.request_id: request.num_computed_tokens for request in self.running}
            )
        return output

    def _make_scheduler_output(self, plan: StepPlan) -> SchedulerOutput:
        work = self.kv_cache_manager.take_step_work()
        resumed_as_new = self.vllm_config.use_v2_model_runner
        output = SchedulerOutput(
            scheduled_new_reqs=plan.make_new_request_data(resumed_as_new=resumed_as_new),
            scheduled_cached_reqs=plan.make_cached_request_data(
                self._previous_step,
                resumed_as_new=resumed_as_new,
                sends_new_tokens=self.limits.sends_new_tokens,
            ),
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=plan.total_num_tokens,
            scheduled_spec_decode_tokens=plan.spec_tokens,
            scheduled_encoder_inputs=plan.encoder_inputs,
            num_common_prefix_blocks=self._count_common_prefix_blocks(plan),
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            preempted_req_ids={request.request_id for request in plan.preempted},
            new_block_ids_to_zero=work.new_block_ids,
            kv_cache_block_copies=work.copies,
            window_tables=work.window_tables,
            drafter_rebuilds=work.drafter_rebuilds,
        )
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        if self.ec_connector is not None:
            output.ec_connector_metadata = self.ec_connector.build_connector_meta(output)
        return output

    def _count_common_prefix_blocks(self, plan: StepPlan) -> list[int]:
        if not self.running or not plan.num_scheduled_tokens:
            return [0] * len(self.kv_cache_config.kv_cache_groups)
        return self.kv_cache_manager.get_num_common_prefix_blocks(self.running[0].request_id)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Advance the scheduled requests, so that the next step can be scheduled at once."""
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.advance(num_tokens)
            if not request.is_prefill_chunk:
                self._inflight_prefills.discard(request)
                scheduler_output.has_structured_output_requests |= request.use_structured_output
        self._previous_step = set(scheduler_output.num_scheduled_tokens)
        # A new set: the message keeps the old one.
        self.finished_req_ids = set()

    def _is_surely_done(self, request: Request) -> bool:
        """Whether tokens on their way already make the request's last step certain."""
        return False

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Take everything from a request that the caller removed from ``running``."""
        assert request.status is RequestStatus.RUNNING
        self.kv_cache_manager.free(request)
        self.encoder_cache_manager.free(request)
        self._inflight_prefills.discard(request)
        request.preempt()
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)

    def _record_admission(self, request: Request, record: PrefillStats) -> None:
        """Count where an admitted request's tokens come from, once per admission.

        A request whose connector failed to load what it promised is admitted a second time: the
        first record stays. Of ``n`` answers to one prompt the first counts, as in ``usage``: the
        others find what it computes.
        """
        is_resumed = request.num_preemptions > 0
        if request.prefill_stats is not None and not is_resumed:
            return
        request.record_prefill_stats(record)
        if self.log_stats and not request.is_extra_answer:
            self._prefix_cache_stats.record(
                num_tokens=record.num_prompt_tokens,
                num_hits=record.num_cached_tokens,
                preempted=is_resumed,
                miss_tokens=record.miss_tokens,
            )

    def _blocks_reserved_for_prefills(self) -> int:
        """Return the blocks that requests in prefill, or loading, will still take."""
        manager = self.kv_cache_manager
        return sum(map(manager.num_blocks_to_finish_prompt, self._inflight_prefills))

    def _try_promote(self, request: Request) -> bool:
        """Whether a queued request may be scheduled; what it waited for may have come."""
        if request.status not in _BLOCKED:
            return True
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self.finished_recving_kv_req_ids:
                return False
            self._update_waiting_for_remote_kv(request)
        elif request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            structured = request.structured_output_request
            if structured is None or not structured.grammar:
                return False
        elif not request.streaming_queue:
            return False
        was_running = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if was_running else RequestStatus.WAITING
        return True

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Let a request whose KV arrived go on from it."""
        finish_loading(self, request)

    # =================================================================== update

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the tokens of a step.

        Args:
            scheduler_output: The step as scheduled.
            model_runner_output: What it gave.

        Returns:
            Outputs by client; with statistics on, at least one.
        """
        outputs, spec_stats = UpdatePass(self, scheduler_output, model_runner_output).run()
        self.publish_kv_events()
        return self._collect_outputs(outputs, spec_stats)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        """Append tokens up to the one that stops the request.

        Returns:
            The tokens that were appended, and whether the request stopped.
        """
        for count, token_id in enumerate(new_token_ids, start=1):
            request.append_output_token_ids(token_id)
            if check_stop(request, self.max_model_len):
                return new_token_ids[:count], True
        return new_token_ids, False

    def _collect_outputs(
        self,
        outputs: dict[int, list[EngineCoreOutput]],
        spec_stats: SpecDecodingStats | None,
    ) -> dict[int, EngineCoreOutputs]:
        """Bundle the step's outputs by client, with refusals, ended requests and statistics."""
        if self._refused:
            for client_index, output in self._refused:
                outputs[client_index].append(output)
            self._refused.clear()
        bundles = {client: EngineCoreOutputs(outputs=items) for client, items in outputs.items()}
        if self.finished_req_ids_dict:
            for client, ids in self.finished_req_ids_dict.items():
                bundle = bundles.setdefault(client, EngineCoreOutputs())
                bundle.finished_requests = ids
            self.finished_req_ids_dict.clear()
        stats = self.make_stats(spec_stats)
        if stats is not None:
            if not bundles:
                bundles[0] = EngineCoreOutputs()
            next(iter(bundles.values())).scheduler_stats = stats
        return bundles

    def publish_kv_events(self) -> None:
        """Send what the cache did since the last step; steps do so by themselves."""
        events = list(self.kv_cache_manager.take_events() or ())
        if self.connector is not None:
            events += self.connector.take_events() or ()
        if events:
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take draft tokens for the next step; ended requests and prefill chunks get none."""
        pairs = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        for request_id, drafts in pairs:
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            if request.is_prefill_chunk:
                request.spec_token_ids = []
                continue
            if request.use_structured_output and self.structured_output_manager.should_advance(
                request
            ):
                structured = request.structured_output_request
                assert structured is not None
                drafts = structured.grammar.validate_tokens(drafts)
            request.spec_token_ids = drafts

    # ============================================================ cache, stats

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes.

        Args:
            reset_running_requests: Preempt everything that runs, so that no block is in use.
            reset_connector: Forget the connector's prefixes too.

        Returns:
            False, with nothing of the local cache forgotten, while blocks are in use; and if the
            connector refuses.
        """
        if reset_running_requests:
            timestamp = time.monotonic()
            # From the end, each to the front: they wait in the order in which they ran.
            while self.running:
                request = self.running.pop()
                self._preempt_request(request, timestamp)
                # Tokens of steps in flight rest on the cache that goes away now.
                request.async_tokens_to_discard += request.num_output_placeholders
                request.num_output_placeholders = 0
            self._previous_step = set()
        done = self.kv_cache_manager.reset_prefix_cache()
        # Hit rates over recent requests begin anew.
        self._prefix_cache_stats.reset |= done
        if reset_connector:
            done = self.reset_connector_cache() and done
        return done

    def reset_connector_cache(self) -> bool:
        """Forget the connector's prefixes; True if there is none."""
        if self.connector is None:
            return True
        # None means that the connector keeps nothing to forget.
        return self.connector.reset_cache() is not False

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs."""
        self.encoder_cache_manager.reset()

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None
    ) -> SchedulerStats | None:
        """Return the state after a step; None when statistics are off."""
        if not self.log_stats:
            return None
        prefix_stats, self._prefix_cache_stats = self._prefix_cache_stats, PrefixCacheStats()
        connector_stats = self.connector_prefix_cache_stats
        if connector_stats is not None:
            self.connector_prefix_cache_stats = PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_skipped_waiting_reqs=len(self.skipped_waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=prefix_stats,
            connector_prefix_cache_stats=connector_stats,
            spec_decoding_stats=spec_decoding_stats,
        )

    def shutdown(self) -> None:
        """Stop the event publisher and the connectors."""
        self.kv_event_publisher.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
