"""The server's scheduler and cache without a model: the steps are real, the tokens are not."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.benchmarks.draws import Draws
from vllm.cachelab.sim.cost import StepShape
from vllm.cachelab.sim.scored_prompts import ScoredPrompts
from vllm.cachelab.sim.settings import SimBase, SimSettings
from vllm.cachelab.sim.tier import SimTier
from vllm.distributed.kv_events import EventPublisher
from vllm.v1.core.kv_cache_coordinator import as_served
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_ACCEPTANCE_STREAM = 31


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts stand.

    Attributes:
        rate: Chance of each draft that the one before it stands.
        seed: Of the draws.
    """

    rate: float = 0.7
    seed: int = 0

    def make(self) -> Callable[[int], int]:
        """Return a function from drafts to accepted ones."""
        draws = Draws(self.seed, _ACCEPTANCE_STREAM)

        def accept(num_drafts: int) -> int:
            count = 0
            while count < num_drafts and draws.uniform() < self.rate:
                count += 1
            return count

        return accept


class SimEngine:
    """Steps the scheduler with made-up tokens.

    Owns: the scheduler.

    Args:
        settings: Of the server.
        acceptance: Of drafts.
        decode_stride: Tokens a decode step brings, where single steps would take too long.
        watch: Is told what enters and leaves the cache; None: nobody is.
        base: Made of the settings, where many engines share it; None: it is made.
    """

    def __init__(
        self,
        settings: SimSettings,
        acceptance: Acceptance | None = None,
        decode_stride: int = 1,
        watch: EventPublisher | None = None,
        base: SimBase | None = None,
    ) -> None:
        base = base or settings.prepare(tells_events=watch is not None)
        config, self.plan = base.config, base.plan
        make = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = make(
            config,
            self.plan.scheduler_config,
            StructuredOutputManager(config),
            block_size=self.plan.unit,
            kv_event_publisher=watch,
        )
        if settings.runs_towers:
            self.scheduler.make_pictures_in_steps()
        speculative = config.speculative_config
        # Where drafts are weighed nobody knows how many there would be: there are none.
        self.num_drafts = 0 if speculative is None else speculative.usual_drafts
        self.has_drafter = speculative is not None
        self._accept = (acceptance or Acceptance()).make()
        self._stride = decode_stride
        self.num_preemptions = 0
        self.scored_prompts = ScoredPrompts()
        connector = self.scheduler.connector
        self.tier = connector if isinstance(connector, SimTier) else None

    @property
    def hash_unit(self) -> int:
        """Tokens under one prefix hash."""
        return self.plan.unit

    @property
    def lazy_group_ids(self) -> tuple[int, ...]:
        """Groups of layers that leave rows out, which partial checkpoints lack."""
        geometry = as_served(self.scheduler.kv_cache_manager.coordinator).geometry
        return tuple(group.group_id for group in geometry.windows if group.lazy_reach)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Let held prefixes go, and tiers work, by a clock of the caller's, in seconds."""
        as_served(self.scheduler.kv_cache_manager.coordinator).held.use_clock(clock)
        if self.tier is not None:
            self.tier.use_clock(clock)

    def next_s(self) -> float | None:
        """Return when something on its way ends that a step may wait for; None: nothing is."""
        return None if self.tier is None else self.tier.device.next_s()

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add_request(request)

    def has_work(self) -> bool:
        """Whether requests wait or run."""
        return self.scheduler.has_unfinished_requests()

    def schedule(self) -> tuple[SchedulerOutput, StepShape]:
        """Decide a step; returns it and what it computes."""
        step = self.scheduler.schedule()
        requests = self.scheduler.requests
        shape = StepShape()
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = requests[request_id]
            start = request.num_computed_tokens - num_tokens
            # The last prompt token alone, after a hit, still is prefill: its logits are the first.
            shape.add(start, num_tokens, is_decode=start >= request.num_prompt_tokens)
        self.num_preemptions += len(step.preempted_req_ids or ())
        if self.tier is not None:
            self.tier.take_orders(step.kv_connector_metadata)
        return step, shape

    def finish(self, step: SchedulerOutput) -> list[EngineCoreOutput]:
        """Bring the tokens of a step; returns what clients are told."""
        requests = self.scheduler.requests
        sampled: list[list[int]] = []
        drafted: list[str] = []
        drafts = step.scheduled_spec_decode_tokens
        for request_id in step.num_scheduled_tokens:
            request = requests[request_id]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            drafted.append(request_id)
            own = drafts.get(request_id)
            accepted = self._accept(len(own)) if own else 0
            # A decode step brings the stride; the token that ends a prompt comes alone.
            count = self._stride if request.num_output_tokens else 1
            sampled.append([0] * (count + accepted))
        ids = list(step.num_scheduled_tokens)
        result = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        result.prompt_logprobs_dict = self.scored_prompts.rows(step, requests)
        if self.tier is not None:
            result.kv_connector_output = self.tier.report()
        bundles = self.scheduler.update_from_output(step, result)
        if self.num_drafts:
            changes = [[0] * self.num_drafts for _ in drafted]
            self.scheduler.update_draft_token_ids(DraftTokenIds(drafted, changes))
        return [output for bundle in bundles.values() for output in bundle.outputs]
