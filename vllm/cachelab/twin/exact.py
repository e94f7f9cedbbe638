"""The recorded run again, step for step: what went in goes in, and every decision is made anew."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.cachelab.sim.cost import StepShape
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.trace.events import (
    Aborted,
    Added,
    Begun,
    DiskSeen,
    HeldSeen,
    Reset,
    SessionEnded,
    Step,
)
from vllm.cachelab.twin.rebuild import environment_of, make_request, settings_of
from vllm.cachelab.twin.tier import ReplayedTier, measured_rates, open_folder, output_of
from vllm.cachelab.twin.trace_file import CacheTrace, RecordedRequest
from vllm.distributed.kv_events import EventPublisher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.messages import PrefillStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

_TOKEN = 0
# Of a run in which steps were ahead: whoever ends at it is seen to end a step late.
_LAST_TOKEN = 1


@dataclass(slots=True)
class TwinResult:
    """What the replay of a run came to.

    Attributes:
        cached_tokens: By request number, at its first admission.
        misses: By request number, tokens by reason.
        shapes: Of each step with tokens, with the seconds it took in life.
        diverged_at: Number of the first step that computes another number of tokens than
            recorded; None: none does.
        num_steps: Replayed.
        num_preemptions: In the replay.
    """

    cached_tokens: dict[int, int] = field(default_factory=dict)
    misses: dict[int, PrefillStats] = field(default_factory=dict)
    shapes: list[tuple[StepShape, float]] = field(default_factory=list)
    diverged_at: int | None = None
    num_steps: int = 0
    num_preemptions: int = 0


class ExactTwin:
    """Replays a trace event by event.

    Owns: the engine, the steps whose results have not come, and which request has which number.

    Args:
        trace: What was recorded.
        settings: Of the cache; None: as recorded. Other settings replay the same arrivals by step,
            which is what a counterfactual wants: all but one thing is equal.
        watch: Is told what enters and leaves the cache.
        changes: Requests that are otherwise than recorded, by number.
    """

    def __init__(
        self,
        trace: CacheTrace,
        settings: SimSettings | None = None,
        watch: EventPublisher | None = None,
        changes: Mapping[int, RecordedRequest] | None = None,
    ) -> None:
        self._trace = trace
        self._requests = {**trace.requests, **(changes or {})}
        # What the disk did is known of the recorded run alone; of any other it is simulated.
        is_recorded = settings is None and not changes
        with environment_of(trace.header):
            self.engine = SimEngine(
                settings or settings_of(trace.header, is_recorded=is_recorded), watch=watch
            )
        self._scheduler = self.engine.scheduler
        self._is_ahead = isinstance(self._scheduler, AsyncScheduler)
        self._begun: deque[tuple[SchedulerOutput, StepShape]] = deque()
        self._now_s = 0.0
        self.engine.use_clock(self._clock)
        connector, tier = self._scheduler.connector, trace.header.tier
        self._tier = connector if isinstance(connector, ReplayedTier) else None
        if self._tier is not None and tier is not None:
            self._tier.begin(trace.disk_changes(), self._clock, tier["unix_s"])
        if self.engine.tier is not None:
            self.engine.tier.use_rates(measured_rates(trace))
            open_folder(trace, self.engine.tier)
        self.numbers: dict[str, int] = {}
        self.result = TwinResult()
        self._waiting_ids: set[str] = set()

    def _clock(self) -> float:
        return self._now_s

    def run(self) -> TwinResult:
        """Replay everything."""
        for event in self._trace.events:
            self.feed(event)
        return self.result

    def feed(self, event: object) -> None:
        """Replay one event."""
        self._now_s = getattr(event, "time_us", 0) / 1e6
        match event:
            case Begun():
                self._begun.append(self._schedule(event))
            case Step() if not event.is_begun:
                self._finish(*self._schedule(event), event)
            case Step() if self._begun:
                self._finish(*self._begun.popleft(), event)
            case Added():
                self._add(event)
            case Aborted():
                self._abort(event)
            case Reset():
                self._scheduler.reset_prefix_cache(event.resets_running, event.resets_tiers)
            case DiskSeen() if self._tier is not None:
                self._tier.see(event)
            case HeldSeen():
                self._scheduler.held_prefixes(event.forgotten)
            case SessionEnded():
                self._scheduler.end_session(event.session)

    def _abort(self, event: Aborted) -> None:
        ids = [self._id_of(ending.number) for ending in event.ended]
        self._scheduler.finish_requests(
            [request_id for request_id in ids if request_id is not None],
            RequestStatus.FINISHED_ABORTED,
        )

    def _id_of(self, number: int) -> str | None:
        recorded = self._trace.requests.get(number)
        return None if recorded is None else recorded.request_id

    def _add(self, event: Added) -> None:
        recorded = self._requests[event.number]
        length = recorded.num_output_tokens
        # A request that ended by itself ends at the same token here; one that was aborted, or
        # refused for what it might have needed, keeps the length it asked for.
        ends_itself = length and not recorded.is_aborted
        max_tokens = length if ends_itself and length else event.max_tokens
        stops: tuple[int, ...] = ()
        if self._is_ahead:
            # How long it might have become decides how far ahead it was scheduled.
            max_tokens, stops = event.max_tokens, (_LAST_TOKEN,)
        request = make_request(
            recorded,
            self._trace.header.hash_unit,
            self.engine.hash_unit,
            max_tokens,
            stops,
            has_eyes=self._trace.header.images is not None,
        )
        if event.is_blocked:
            request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
            request.streaming_queue = None
        self.numbers[request.request_id] = event.number
        self._waiting_ids.add(request.request_id)
        self._scheduler.add_request(request)

    def _schedule(self, event: Begun | Step) -> tuple[SchedulerOutput, StepShape]:
        requests = self._scheduler.requests
        for number in event.unblocked:
            request = requests.get(self._id_of(number) or "")
            if request is not None:
                request.unblock()
        step, shape = self.engine.schedule()
        result = self.result
        result.num_steps += 1
        result.num_preemptions = self.engine.num_preemptions
        if step.total_num_scheduled_tokens != event.num_tokens and result.diverged_at is None:
            result.diverged_at = result.num_steps
        self._note_admissions(step)
        return step, shape

    def _finish(self, step: SchedulerOutput, shape: StepShape, event: Step) -> None:
        if step.total_num_scheduled_tokens:
            self.result.shapes.append((shape, event.duration_us / 1e6))
        if event.arrived_us:
            self._now_s = event.arrived_us / 1e6
        self._bring_tokens(step, event)

    def _note_admissions(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            if new.req_id not in self._waiting_ids:
                continue
            self._waiting_ids.discard(new.req_id)
            stats = self._scheduler.requests[new.req_id].prefill_stats
            if stats is not None:
                number = self.numbers[new.req_id]
                self.result.cached_tokens[number] = stats.num_cached_tokens
                self.result.misses[number] = stats

    def _bring_tokens(self, step: SchedulerOutput, event: Step) -> None:
        counts = dict(event.counts)
        drafts = dict(event.drafts)
        requests = self._scheduler.requests
        # Others ended while the step ran.
        scheduled = [requests[name] for name in step.num_scheduled_tokens if name in requests]
        sampled = [self._tokens(request, counts) for request in scheduled]
        ids = [request.request_id for request in scheduled]
        output = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        output.prompt_logprobs_dict = self.engine.scored_prompts.rows(step, requests)
        output.made_pictures = [own for own in event.made if self._scheduler.is_making(own[0])]
        if self._tier is not None:
            output.kv_connector_output = output_of(event.report)
        elif self.engine.tier is not None:
            output.kv_connector_output = self.engine.tier.report()
        self._scheduler.update_from_output(step, output)
        if self.engine.has_drafter:
            usual = self.engine.num_drafts
            # As many as were taken: here a request ends where it did, and there perhaps sooner than
            # it had to, so that more was drafted than would be left.
            for request in scheduled:
                if not request.is_finished():
                    likely = 0 if request.is_prefill_chunk else usual
                    count = drafts.get(self.numbers[request.request_id], likely)
                    request.propose_drafts([0] * count)

    def _tokens(self, request: Request, counts: dict[int, int]) -> list[int]:
        number = self.numbers[request.request_id]
        count = counts.get(number, 0 if request.is_prefill_chunk else 1)
        recorded = self._requests[number]
        start = request.num_tokens
        if self._is_ahead:
            last = None if recorded.is_aborted else recorded.num_output_tokens
            return [
                _LAST_TOKEN if place == last else _TOKEN
                for place in range(
                    request.num_output_tokens + 1, request.num_output_tokens + 1 + count
                )
            ]
        known = recorded.tokens
        if not known:
            return [_TOKEN] * count
        return [known.get(position, _TOKEN) for position in range(start, start + count)]
