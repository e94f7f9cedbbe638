"""A scheduler that writes down what it is told and what its steps bring."""

from __future__ import annotations

import hashlib
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from vllm.cachelab.trace.events import (
    Aborted,
    Added,
    Begun,
    Closed,
    DiskChange,
    DiskChanges,
    DiskObject,
    DiskSeen,
    Ending,
    Header,
    HeldSeen,
    Reset,
    SessionEnded,
    Step,
    TierReport,
    Told,
)
from vllm.cachelab.trace.hash_chain import HashChains
from vllm.cachelab.trace.small_files import write_small
from vllm.cachelab.trace.writer import TraceWriter
from vllm.v1.core.kv_cache_coordinator import as_served
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.connector import OffloadingConnector
from vllm.v1.kv_offload.orders import OffloadReport
from vllm.v1.kv_offload.store.latched_disk import (
    DiskContent,
    DiskState,
    LatchedDisk,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.store.records import StoredObject
    from vllm.v1.kv_offload.store.store_log import StoreChange
    from vllm.v1.messages import EngineCoreOutputs, HeldPrefix
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus


class CacheRecorder:
    """Writes the lines of a trace.

    Owns: the writer, the numbers of live requests, the steps that are not written yet.

    Args:
        writer: Takes lines.
        header: Of every part.
        keeps_tokens: Whether the tokens behind units matter to the cache.
        num_drafts: Drafts that a request usually gets; None: there is no drafter.
        monotonic: Seconds.
    """

    def __init__(
        self,
        writer: TraceWriter,
        header: Header,
        *,
        keeps_tokens: bool,
        num_drafts: int | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._header = header
        self._chains = HashChains(header.hash_unit, keeps_tokens=keeps_tokens)
        self._num_drafts = num_drafts
        self._monotonic = monotonic
        self._origin = monotonic()
        self._numbers: dict[str, int] = {}
        self._live: dict[int, Request] = {}
        self._blocked: dict[int, tuple[Request, RequestStatus]] = {}
        self._fresh: set[str] = set()
        self._next_number = 0
        # Scheduled, and nothing else happened since.
        self._scheduled: Step | None = None
        # Written as begun; their results have not come.
        self._begun: deque[Step] = deque()
        # Whose results came last; its drafts may be to come.
        self._step: Step | None = None
        self._time_us = self._last_end_us = 0
        self._disk = DiskState(is_opening=True)
        writer.write(header)

    def now_us(self) -> int:
        """Return the time since the trace began."""
        return int((self._monotonic() - self._origin) * 1e6)

    def tick(self) -> int:
        """Let the scheduler's clock go on to now; return that time."""
        self._time_us = self.now_us()
        return self._time_us

    def clock(self) -> float:
        """Return the time of the line that is being written, which its replay will see, too."""
        return self._time_us / 1e6

    def unix_clock(self) -> float:
        """Return that time since 1970, as the header has it."""
        tier = self._header.tier or {}
        return float(tier.get("unix_s", 0.0)) + self.clock()

    def _settle(self) -> None:
        """Write the step that is still open; begin another part where this one is full."""
        if self._step is not None:
            step, self._step = self._step, None
            self._writer.write(step)
        if self._scheduled is not None:
            # Something comes before its results do.
            step, self._scheduled = self._scheduled, None
            self._begun.append(step)
            self._writer.write(
                Begun(
                    step.time_us,
                    step.num_tokens,
                    step.admitted,
                    step.unblocked,
                    step.num_preempted,
                    step.told,
                )
            )
        if self._writer.is_full:
            self._writer.rotate()
            self._chains.forget()
            self._header.part += 1
            self._writer.write(self._header)
        if not self._live:
            self._writer.flush()  # the next line may be hours away

    def add(self, request: Request) -> None:
        """Note a request that was queued."""
        self._settle()
        number = self._next_number
        self._next_number += 1
        self._numbers[request.request_id] = number
        self._live[number] = request
        self._fresh.add(request.request_id)
        if request.is_blocked:
            self._blocked[number] = request, request.status
        is_private = request.skip_cache_insert
        chains = self._chains
        self._writer.write(
            Added(
                number,
                request.request_id,
                self.tick(),
                request.num_prompt_tokens,
                request.max_tokens,
                chains.known_to_others(request) if is_private else chains.prompt(request),
                request.priority,
                request.skip_reading_prefix_cache and request.num_scores is None,
                request.is_blocked,
                list(request.cache_boundaries),
                request.is_extra_answer,
                request.arrival_time,
                list(request.cache_ttls.items()),
                request.num_scores,
                is_private,
                list(request.options.cache_junctions),
                request.session,
                request.options.stays_in_memory,
                request.is_spare,
                request.options.cache_insert_end,
                [] if is_private else _list_images(request),
            )
        )

    def _end(self, request_id: str) -> Ending | None:
        number = self._numbers.pop(request_id, None)
        if number is None:
            return None
        self._fresh.discard(request_id)
        self._blocked.pop(number, None)
        request = self._live.pop(number)
        if request.skip_cache_insert:
            # Others may have brought more of it since it came.
            units = self._chains.known_to_others(request)
            return Ending(number, request.num_output_tokens, units)
        return Ending(number, request.num_output_tokens, self._chains.answer(request))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Note requests that were ended from outside."""
        self._settle()
        ended = [ending for ending in map(self._end, request_ids) if ending is not None]
        if ended:
            self._writer.write(Aborted(ended, self._time_us))

    def reset(self, *, resets_running: bool, resets_tiers: bool, done: bool) -> None:
        """Note a reset."""
        self._settle()
        self._writer.write(Reset(resets_running, done, self._time_us, resets_tiers))

    def look_at_held(self, forgotten: str) -> None:
        """Note that held prefixes were looked at, which lets go of those whose time is over."""
        self._settle()
        self._writer.write(HeldSeen(self._time_us, forgotten))

    def end_session(self, session: int) -> None:
        """Note that a session is over."""
        self._settle()
        self._writer.write(SessionEnded(self._time_us, session))

    def see_disk(self, state: DiskState, content: DiskContent | None) -> None:
        """Note what the next step sees of the disk, if it is new."""
        if state == self._disk and content is None:
            return
        self._settle()
        self._disk = state
        seen = DiskSeen(
            self._time_us,
            state.is_open,
            state.is_opening,
            state.is_digesting,
            state.is_writable,
        )
        if content is not None:
            seen.last_sequence = content.last_sequence
            seen.objects = [self._disk_object(found) for found in content.objects]
            seen.small = {name: write_small(name, data) for name, data in content.small.items()}
            seen.opened_bytes, seen.max_bytes = content.opened_bytes, content.max_bytes
        self._writer.write(seen)

    def _disk_object(self, found: StoredObject) -> DiskObject:
        extent = found.extent
        return DiskObject(
            int(extent.key.kind),
            b64encode(extent.key.digest).decode(),
            found.position,
            extent.num_bytes,
            extent.sequence,
            self._chains.number_of(found.next_token),
        )

    def note_changes(self, changes: Sequence[StoreChange]) -> None:
        """Note what the disk's thread changed; it may be written before the step it was in."""
        if not changes:
            return
        self._writer.write(
            DiskChanges(
                [
                    DiskChange(
                        change.after,
                        change.kind,
                        DiskObject(
                            int(change.key.kind),
                            b64encode(change.key.digest).decode(),
                            change.position,
                            change.num_bytes,
                            change.sequence,
                            self._chains.number_of(change.next_token),
                        ),
                    )
                    for change in changes
                ]
            )
        )

    def _take_first(self) -> Step:
        """Return the line of the step whose results come next."""
        if not self._begun:
            step, self._scheduled = self._scheduled, None
            assert step is not None
            return step
        self._settle()
        begun = self._begun.popleft()
        return Step(begun.time_us, 0, begun.num_tokens, is_begun=True)

    def hear(self, output: KVConnectorOutput | None) -> None:
        """Note what a step's results tell of the tiers, before it is acted upon."""
        step = self._step = self._take_first()
        step.arrived_us = self.tick()
        if output is None:
            return
        report = output.kv_connector_worker_meta
        if not isinstance(report, OffloadReport):
            # A step after which workers have nothing to tell.
            report = OffloadReport()
        told = TierReport(
            list(output.finished_recving or ()),
            list(output.failed_recving),
            list(report.written.items()),
            list(report.unwritten.items()),
            sorted(report.unsynced),
            sorted(report.corrupt),
            dict(report.failures),
            report.num_failed_reads,
            {name: (moved.num_bytes, moved.seconds) for name, moved in report.read.items()},
        )
        if told != TierReport():
            step.report = told

    def note_made(self, made: Iterable[tuple[str, bool]]) -> None:
        """Note what towers made beside the steps: by key, whether it was made or given up."""
        assert self._step is not None
        self._step.made = [(_short(key), is_made) for key, is_made in made]

    def schedule(self, output: SchedulerOutput, begin_us: int) -> None:
        """Note a step as it was scheduled."""
        self._settle()
        step = Step(begin_us, 0, output.total_num_scheduled_tokens)
        step.num_preempted = len(output.preempted_req_ids or ())
        if self._fresh:
            for new in output.scheduled_new_reqs:
                self._note_admission(new.req_id, step)
        if self._blocked:
            # In the same step it may have begun to wait for a tier, which the twin sees for itself.
            step.unblocked = [
                number
                for number, (request, waited_for) in self._blocked.items()
                if request.status is not waited_for
            ]
            for number in step.unblocked:
                del self._blocked[number]
        self._scheduled = step

    def _note_admission(self, request_id: str, step: Step) -> None:
        if request_id in self._fresh:
            self._fresh.discard(request_id)
            number = self._numbers[request_id]
            stats = self._live[number].prefill_stats
            step.admitted.append((number, stats.num_cached_tokens if stats is not None else 0))
            if stats is not None and self._header.tier is not None:
                step.told.append(Told(number, stats.hit_sources(), dict(stats.miss_tokens)))

    def update(self, counts: list[tuple[Request, int]], ended_ids: Iterable[str]) -> None:
        """Note what a step brought.

        Args:
            counts: Its requests, with the tokens that came: what comes behind an answer's end, or
                was given up, is no part of it, but was computed all the same.
            ended_ids: Requests that ended by themselves, or were refused.
        """
        step = self._step
        assert step is not None
        for request, count in counts:
            if count != (0 if request.is_prefill_chunk else 1):
                number = self._numbers.get(request.request_id)
                if number is not None:
                    step.counts.append((number, count))
        step.ended = [e for e in map(self._end, ended_ids) if e is not None]
        now_us = self.now_us()
        # One that was scheduled while another ran began when that one ended.
        step.duration_us = now_us - max(step.time_us, self._last_end_us)
        self._last_end_us = now_us
        if self._num_drafts is None:
            self._settle()

    def drafts(self, request_ids: Iterable[str]) -> None:
        """Note requests that did not get as many drafts as is usual."""
        step = self._step
        if step is None:
            return
        for request_id in request_ids:
            number = self._numbers.get(request_id)
            if number is None:
                continue
            request = self._live[number]
            usual = 0 if request.is_prefill_chunk else self._num_drafts or 0
            if len(request.spec_token_ids) != usual:
                step.drafts.append((number, len(request.spec_token_ids)))

    def close(self) -> None:
        """Write what is left."""
        self._settle()
        alive = [e for e in map(self._end, list(self._numbers)) if e is not None]
        self._writer.write(Closed(alive))
        self._writer.close()


class RecordedScheduler(Scheduler):
    """The scheduler, with a recorder at its doors: what goes in, and what steps bring.

    Args:
        recorder: Writes it down; made by the caller, with a file of its own.
        *args: As for ``Scheduler``.
        **kwargs: As for ``Scheduler``.
    """

    def __init__(self, recorder: CacheRecorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = recorder
        as_served(self.kv_cache_manager.coordinator).held.use_clock(recorder.clock)
        self._disk: LatchedDisk | None = None
        if isinstance(self.connector, OffloadingConnector):
            unix = recorder.unix_clock
            self._disk = self.connector.begin_record(recorder.clock, unix)

    @override
    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.recorder.add(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[tuple[str, int]]:
        """End requests from outside."""
        self.recorder.tick()
        ended = super().finish_requests(request_ids, finished_status)
        self.recorder.abort([request_id for request_id, _ in ended])
        return ended

    def schedule(self) -> SchedulerOutput:
        """Decide the next step."""
        begin_us = self.recorder.tick()
        if self._disk is not None:
            self.recorder.see_disk(*self._disk.latch())
        output = super().schedule()
        self.recorder.schedule(output, begin_us)
        return output

    @override
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        requests = self.requests
        sampled, index_of = (
            model_runner_output.sampled_token_ids,
            model_runner_output.req_id_to_index,
        )
        counts = [
            (request, len(sampled[index_of[name]]) if sampled else 0)
            for name in scheduler_output.num_scheduled_tokens
            if (request := requests.get(name)) is not None
        ]
        self.recorder.hear(model_runner_output.kv_connector_output)
        self.recorder.note_made(model_runner_output.made_pictures or ())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._disk is not None:
            self.recorder.note_changes(self._disk.take_changes())
        ended = [o.request_id for b in outputs.values() for o in b.outputs if o.finished]
        self.recorder.update(counts, ended)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take draft tokens for the next step."""
        super().update_draft_token_ids(draft_token_ids)
        self.recorder.drafts(draft_token_ids.req_ids)

    @override
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.recorder.tick()
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        self.recorder.reset(
            resets_running=reset_running_requests, resets_tiers=reset_connector, done=done
        )
        return done

    def held_prefixes(self, forget: str = "") -> tuple[Sequence[HeldPrefix], bool]:
        """Look at held prefixes."""
        self.recorder.tick()
        found = super().held_prefixes(forget)
        self.recorder.look_at_held(forget)
        return found

    def end_session(self, session: int) -> int:
        """End a session."""
        self.recorder.tick()
        num_ended = super().end_session(session)
        self.recorder.end_session(session)
        return num_ended

    def shutdown(self) -> None:
        """Stop the scheduler's helpers, and close the trace."""
        super().shutdown()
        if self._disk is not None:
            self.recorder.note_changes(self._disk.take_changes())
        self.recorder.close()


class RecordedAsyncScheduler(RecordedScheduler, AsyncScheduler):
    """The same of a scheduler that is a step ahead."""


def _list_images(request: Request) -> list[tuple[int, int, str]]:
    """What is recorded of a request's pictures; under a salt nobody can guess them by it."""
    keys = request.encoder_keys()
    return [
        (
            feature.mm_position.offset,
            feature.mm_position.length,
            _short(key),
        )
        for feature, key in zip(request.mm_features, keys, strict=True)
    ]


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]
