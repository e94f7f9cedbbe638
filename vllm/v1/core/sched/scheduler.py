"""The scheduler: what each step computes, and what its tokens change.

There is no prefill and no decode phase. A request has ``num_computed_tokens`` and ``num_tokens``;
a step moves the first toward the second, as far as the token budget and the KV pool allow. That
one rule gives chunked prefill, prefix hits, speculative decoding and preemption by recompute.

``schedule()`` has two passes over one StepBuilder: running requests first (``running_pass``),
then, if nobody was preempted, waiting ones (``admission``); with tenants, prompts of those that
were served most go on after others' admission (``fair_requests``). ``update_from_output()`` has one
(``update_pass``), between the two halves of what a KV connector reports
(``kv_transfer_updates``). The passes know ``Requests`` and what they hold (``Holdings``), and
nothing of the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from vllm import envs
from vllm.distributed.kv_events import EventPublisher, EventPublisherFactory, KVEventBatch
from vllm.v1.core.sched.admission import AdmissionPass
from vllm.v1.core.sched.admission_stats import AdmissionStats
from vllm.v1.core.sched.fair_requests import DeferredPass
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.kv_transfer_updates import KVTransferUpdates, finish_loading
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.requests import Holdings
from vllm.v1.core.sched.running_pass import RunningPass
from vllm.v1.core.sched.scheduler_names import SchedulerNames
from vllm.v1.core.sched.step_builder import SchedulerLimits, StepBuilder
from vllm.v1.core.sched.update_pass import UpdatePass, make_output
from vllm.v1.core.sched.wiring import (
    make_connector,
    make_encoder_planner,
    make_manager,
    make_requests,
)
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, HeldPrefix
from vllm.v1.metrics.stats import SchedulerStats, SpecDecodingStats
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.masks import GrammarMasks

__all__ = ["Scheduler", "SchedulerOutput"]


class Scheduler(SchedulerNames, SchedulerInterface):
    """Synchronous scheduler.

    Owns: the requests with all their fields, the KV manager, the encoder's side, the statistics
    since the last report.

    Args:
        vllm_config: All configuration.
        kv_cache_config: Groups and size of the KV cache.
        structured_output_manager: Knows whose grammar must advance.
        block_size: Scheduler block size in tokens.
        hash_block_size: Tokens under one prefix hash; None: ``block_size``.
        mm_registry: Sizes of multimodal items; None: those of ``vllm.multimodal.registry``.
        include_finished_set: Whether outputs list the requests that ended.
        log_stats: Whether statistics and events are gathered.
        kv_event_publisher: Takes the KV events, and is shut down with the scheduler; None: one is
            made from the configuration.
    """

    # Takes the tokens of a step; a scheduler that runs ahead has another.
    update_pass: ClassVar[type[UpdatePass]] = UpdatePass

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
        self.max_model_len = self.limits.max_model_len
        self._requests = make_requests(
            vllm_config, self.limits, notes_events=log_stats, tells_clients=include_finished_set
        )
        self._previous_step: set[str] = set()
        self._checks_invariants = envs.VLLM_CHECK_INVARIANTS

        self.kv_cache_manager = make_manager(
            vllm_config, kv_cache_config, self.limits, block_size, hash_block_size or block_size
        )
        self._encoder = make_encoder_planner(vllm_config, self.limits, mm_registry)
        self.connector = make_connector(vllm_config, kv_cache_config, self.kv_cache_manager)
        transfer = vllm_config.kv_transfer_config
        self.recompute_kv_load_failures = (
            transfer is not None and transfer.kv_load_failure_policy == "recompute"
        )
        self._stats = AdmissionStats(
            counts=log_stats,
            has_connector=self.connector is not None,
        )
        self.kv_event_publisher = kv_event_publisher or EventPublisherFactory.create(
            vllm_config.kv_events_config, vllm_config.parallel_config.data_parallel_index
        )

    def _get_holdings(self) -> Holdings:
        return Holdings(self._requests, self.kv_cache_manager, self._encoder, self.connector)

    # ================================================================= requests

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserInputError: It can never run.
        """
        if request.mm_features:
            self._encoder.check(request)
        if self.connector is not None:
            # First: it may refuse the request.
            self.connector.on_new_request(request)
        self._requests.add(request)
        if self._requests.running or self._requests.num_waiting > 1:
            # Others take blocks before it does.
            self.kv_cache_manager.claim(request)

    @override
    def get_num_unfinished_requests(self) -> int:
        return sum(self.get_request_counts())

    @override
    def get_request_counts(self) -> tuple[int, int]:
        return len(self._requests.running), self._requests.num_waiting

    @override
    def has_finished_requests(self) -> bool:
        if self._requests.has_changes():
            return True
        if self.connector is None:
            return False
        if self.connector.hooks.has_pending_work():
            return True
        return any(request.is_finished() for request in self._requests.by_id.values())

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
        ended = self._requests.find_alive(request_ids)
        self._requests.remove(ended)
        for request in ended:
            is_loading = self._requests.is_loading(request)
            request.finish(finished_status)
            self._free_request(request, delay_free_blocks=is_loading)
        return [(request.request_id, request.client_index) for request in ended]

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> dict[str, Any] | None:
        """Let an ended request go of everything (see Holdings); a name of the interface."""
        return self._get_holdings().end(request, delay_free_blocks=delay_free_blocks)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Let a request whose KV arrived go on from it; a name of the interface."""
        finish_loading(self._requests, self.kv_cache_manager, request)

    # ================================================================= schedule

    @override
    def schedule(self) -> SchedulerOutput:
        manager = self.kv_cache_manager
        manager.new_step_starts()
        held = self._get_holdings()
        step = StepBuilder(self.limits.max_num_tokens, self._encoder.compute_budget)
        displaced = self._requests.take_displaced(self.limits.max_num_seqs)
        if displaced is not None:
            held.preempt(displaced, step.timestamp)
        deferred = self._requests.order_running()
        RunningPass(held, self.limits, step, len(deferred)).run()
        self._admit(held, step)
        if deferred:
            DeferredPass(held, self.limits, step).finish(deferred)
            self._requests.end_deferral()
            self._admit(held, step)
        if self.connector is not None:
            self.connector.hooks.begin_own_loads()
        assert step.token_budget >= 0
        assert len(self._requests.running) <= self.limits.max_num_seqs
        # All is allocated: from here on later steps may hit what this one computes.
        manager.coordinator.commit_step()
        output = self._make_scheduler_output(step)
        self._update_after_schedule(output)
        self.publish_kv_events()
        if self._checks_invariants:
            manager.check_invariants(
                {
                    request.request_id: request.num_computed_tokens
                    for request in self._requests.running
                }
            )
        return output

    def _admit(self, held: Holdings, step: StepBuilder) -> None:
        """Let waiting requests enter, unless somebody had to leave."""
        if not step.holds_admission:
            finish = self._update_waiting_for_remote_kv
            AdmissionPass(held, self.limits, step, self._stats, finish).run()

    def _make_scheduler_output(self, step: StepBuilder) -> SchedulerOutput:
        work = self.kv_cache_manager.take_step_work()
        resumed_as_new = self.vllm_config.use_v2_model_runner
        output = SchedulerOutput(
            scheduled_new_reqs=step.make_new_request_data(resumed_as_new=resumed_as_new),
            scheduled_cached_reqs=step.make_cached_request_data(
                self._previous_step,
                resumed_as_new=resumed_as_new,
                sends_new_tokens=self.limits.sends_new_tokens,
            ),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=step.total_num_tokens,
            scheduled_spec_decode_tokens=step.spec_tokens,
            scheduled_encoder_inputs=step.encoder_inputs,
            num_common_prefix_blocks=self._count_common_prefix_blocks(step),
            finished_req_ids=self._requests.take_finished_ids(),
            free_encoder_mm_hashes=self._encoder.cache.get_freed_mm_hashes(),
            preempted_req_ids=self._requests.take_preempted_ids(),
            new_block_ids_to_zero=work.new_block_ids,
            kv_cache_block_copies=work.copies,
            window_tables=work.window_tables,
            drafter_rebuilds=work.drafter_rebuilds,
            row_bounds=work.row_bounds,
            loads_within=step.loads_within,
        )
        if self._encoder.orders is not None:
            output.tower_orders = self._encoder.orders.take_new()
            output.dropped_orders = self._encoder.orders.take_dropped()
        if self.connector is not None:
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        if self._encoder.ec_connector is not None:
            output.ec_connector_metadata = self._encoder.ec_connector.build_connector_meta(output)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarMasks | None:
        """Return what grammars allow in the rows of the step just scheduled; None: anything."""
        if not scheduler_output.has_structured_output_requests:
            return None
        return self.structured_output_manager.make_masks(
            self._requests.by_id,
            list(scheduler_output.num_scheduled_tokens),
            scheduler_output.scheduled_spec_decode_tokens,
        )

    def _count_common_prefix_blocks(self, step: StepBuilder) -> list[int]:
        running = self._requests.running
        if not running or not step.num_scheduled_tokens:
            return [0] * len(self.kv_cache_config.kv_cache_groups)
        return self.kv_cache_manager.get_num_common_prefix_blocks(running[0].request_id)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Advance the scheduled requests, so that the next step can be scheduled at once."""
        requests = self._requests.by_id
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = requests[request_id]
            request.advance(num_tokens)
            if not request.is_prefill_chunk:
                self._requests.end_prefill(request)
                scheduler_output.has_structured_output_requests |= request.use_structured_output
        self._previous_step = set(scheduler_output.num_scheduled_tokens)

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
        held = self._get_holdings()
        made, tower_s = model_runner_output.made_pictures, model_runner_output.tower_s
        if made or tower_s:
            for request_id, seconds in self._encoder.note_made(made or (), tower_s).items():
                self._requests.by_id[request_id].note_encoder(seconds)
        spec_stats = None
        if self.log_stats and self.limits.num_spec_tokens:
            spec_stats = SpecDecodingStats.new(self.limits.num_spec_tokens)
        update = self.update_pass(
            held,
            self.structured_output_manager,
            self.max_model_len,
            self._free_request,
            spec_stats,
        )
        report = model_runner_output.kv_connector_output
        if report is None:
            outputs = update.run(scheduler_output, model_runner_output, void=set())
        else:
            transfers = KVTransferUpdates(held, self.recompute_kv_load_failures)
            void = transfers.apply_failed(report.invalid_block_ids)
            transfers.apply_failed_loads(report)
            outputs = update.run(scheduler_output, model_runner_output, void)
            transfers.apply_finished(report)
        self.publish_kv_events()
        return self._collect_outputs(outputs, spec_stats)

    def _collect_outputs(
        self,
        outputs: dict[int, list[EngineCoreOutput]],
        spec_stats: SpecDecodingStats | None,
    ) -> dict[int, EngineCoreOutputs]:
        """Bundle the step's outputs by client, with refusals, ended requests and statistics."""
        for request in self._requests.take_refused():
            outputs[request.client_index].append(make_output(request, []))
        bundles = {client: EngineCoreOutputs(outputs=items) for client, items in outputs.items()}
        for client, ids in self._requests.take_finished_by_client().items():
            bundles.setdefault(client, EngineCoreOutputs()).finished_requests = ids
        stats = self.make_stats(spec_stats if spec_stats and spec_stats.num_drafts else None)
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

    def make_pictures_in_steps(self) -> None:
        """Have nothing made beside the steps: for whoever runs no towers; before any request."""
        self._encoder.orders = None

    def is_making(self, key: str) -> bool:
        """Whether a picture is being made beside the steps."""
        return self._encoder.orders is not None and self._encoder.orders.is_open(key)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take draft tokens for the next step; ended requests and prefill chunks get none.

        Nor does anybody more than the step may bring: one token comes without drafts.
        """
        pairs = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        for request_id, drafts in pairs:
            request = self._requests.by_id.get(request_id)
            if request is None or request.is_finished():
                continue
            if request.is_prefill_chunk:
                drafts = []
            elif request.use_structured_output:
                drafts = self.structured_output_manager.filter_drafts(request, drafts)
            num_useful = request.max_tokens - request.num_output_tokens - 1
            request.propose_drafts(drafts[: max(0, num_useful)])

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
            held, timestamp = self._get_holdings(), time.monotonic()
            # From the end, each to the front: they wait in the order in which they ran.
            while self._requests.running:
                request = self._requests.running.pop()
                held.preempt(request, timestamp)
                request.discard_tokens_in_flight()
            self._previous_step = set()
        done = self.kv_cache_manager.reset_prefix_cache()
        if done:
            self._stats.note_reset()
        if reset_connector:
            done = self.reset_connector_cache() and done
        return done

    def held_prefixes(self, forget: str = "") -> tuple[Sequence[HeldPrefix], bool]:
        """Let go of one held prefix, if asked to; return the others, and whether it was there."""
        manager = self.kv_cache_manager
        forgotten = bool(forget) and manager.coordinator.forget_prefix(forget)
        return manager.coordinator.held_prefixes(), forgotten

    def end_session(self, session: int) -> int:
        """Make spare what only a session used; return how many checkpoints, or blocks, that is."""
        return self.kv_cache_manager.coordinator.end_session(session)

    def reset_connector_cache(self) -> bool:
        """Forget the connector's prefixes; True if there is none."""
        if self.connector is None:
            return True
        # None means that the connector keeps nothing to forget.
        return self.connector.reset_cache() is not False

    @override
    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None
    ) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        local, external = self._stats.take()
        num_queries, num_hits, encoder_s = self._encoder.counts.take()
        collector = self.kv_cache_manager.block_pool.metrics_collector
        return SchedulerStats(
            num_running_reqs=len(self._requests.running),
            num_waiting_reqs=len(self._requests.waiting),
            num_skipped_waiting_reqs=len(self._requests.skipped_waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=local,
            connector_prefix_cache_stats=external,
            spec_decoding_stats=spec_decoding_stats,
            cache_policy=self.kv_cache_manager.coordinator.policy_stats(),
            kv_cache_eviction_events=[] if collector is None else collector.drain_events(),
            offload=None if self.connector is None else self.connector.hooks.take_stats(),
            pulled=None if self.connector is None else self.connector.hooks.take_pull_stats(),
            num_item_queries=num_queries,
            num_item_hits=num_hits,
            encoder_s=encoder_s,
        )

    def shutdown(self) -> None:
        """Stop the event publisher and the connectors."""
        self.kv_event_publisher.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
