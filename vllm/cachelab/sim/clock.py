"""A load through the simulated engine: when each request's tokens come."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm.benchmarks.client.observation import Observation, Usage
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.request import Request

_MAX_IDLE_STEPS = 1000


class LoadRequest(Protocol):
    """A request of a load; ``SimRequest`` is one."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of its prompt."""

    @property
    def num_output_tokens(self) -> int:
        """Of its answer."""

    @property
    def arrival_s(self) -> float:
        """When it comes."""

    @property
    def turn(self) -> int | None:
        """Its turn or round, if the load has any."""

    def make(self) -> Request:
        """Return the scheduler's request."""


@dataclass(slots=True)
class SimResult:
    """What a simulated run came to.

    Attributes:
        seen: One observation a request, in the order given; those that cannot run have an error.
        duration_s: By the simulated clock.
        num_steps: Of the engine.
        num_preemptions: Requests that had to compute again.
        recomputed_tokens: Prompt tokens that were not hit although an earlier prompt had them.
    """

    seen: list[Observation]
    duration_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    miss_tokens: Counter[str] = field(default_factory=Counter)

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that missed though they had been computed before."""
        known = (
            "evicted",
            "window_not_retained",
            "window_evicted",
            "state_not_retained",
            "state_evicted",
            "drafter",
        )
        return sum(self.miss_tokens[reason] for reason in known)


class Ledger:
    """What clients see of a load: who is due, who is open, what came of each.

    Owns: the result and its observations.

    Args:
        max_concurrency: Requests that clients have open; None: any number.
        on_done: Called for each request that ended.
    """

    def __init__(
        self, max_concurrency: int | None = None, on_done: Callable[[], object] | None = None
    ) -> None:
        self.result = SimResult([])
        self._limit = max_concurrency
        self._on_done = on_done
        self._open: dict[str, Observation] = {}
        self._due: deque[tuple[LoadRequest, Observation]] = deque()

    def expect(self, requests: Sequence[LoadRequest]) -> None:
        """Note the whole load; observations keep its order."""
        self.result.seen = [
            Observation(
                turn=request.turn,
                num_prompt_tokens=request.num_prompt_tokens,
                num_wanted_tokens=request.num_output_tokens,
                request_id=request.request_id,
            )
            for request in requests
        ]
        pairs = zip(requests, self.result.seen, strict=True)
        self._due = deque(sorted(pairs, key=lambda pair: pair[0].arrival_s))

    def next_arrival_s(self) -> float | None:
        """Return when the next request comes; None: all have come."""
        return self._due[0][0].arrival_s if self._due else None

    def has_room(self) -> bool:
        """Whether clients may open another request."""
        return self._limit is None or len(self._open) < self._limit

    def take_due(self, now: float) -> Iterator[LoadRequest]:
        """Open the requests that are due, as far as clients may, and yield them."""
        while self._due and self._due[0][0].arrival_s <= now and self.has_room():
            request, seen = self._due.popleft()
            # With a limit the client waits; the clock of a request starts when it is sent.
            seen.start_s = now if self._limit is not None else request.arrival_s
            seen.queue_s = now - request.arrival_s if self._limit is not None else 0.0
            self._open[request.request_id] = seen
            yield request

    def take(self, output: EngineCoreOutput, now: float) -> None:
        """Note an output."""
        seen = self._open[output.request_id]
        if output.prefill_stats is not None:
            stats = output.prefill_stats
            seen.usage = Usage(
                cached_tokens=stats.num_cached_tokens, miss_tokens=dict(stats.miss_tokens)
            )
            self.result.miss_tokens.update(stats.miss_tokens)
        if output.new_token_ids:
            seen.chunk_s.append(now - seen.start_s)
            seen.num_output_tokens += len(output.new_token_ids)
        if output.finished:
            seen.latency_s = now - seen.start_s
            if not seen.chunk_s:
                seen.error = str(output.stop_reason)
            del self._open[output.request_id]
            if self._on_done is not None:
                self._on_done()


class ClockedRun:
    """Feeds requests at their times, at most so many at once.

    Args:
        engine: The scheduler.
        cost: Time of a step.
        max_concurrency: Requests that clients have open; None: any number.
        on_done: Called for each request that ended.
        interruptions: What else happens, and when, in order.
    """

    def __init__(
        self,
        engine: SimEngine,
        cost: CostModel,
        max_concurrency: int | None = None,
        on_done: Callable[[], object] | None = None,
        interruptions: Sequence[tuple[float, Callable[[], object]]] = (),
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._ledger = Ledger(max_concurrency, on_done)
        self._interruptions = deque(interruptions)
        self._now = 0.0
        engine.use_clock(lambda: self._now)

    def run(self, requests: Sequence[LoadRequest]) -> SimResult:
        """Serve all requests to their ends."""
        result, ledger = self._ledger.result, self._ledger
        ledger.expect(requests)
        idle_steps = 0
        while ledger.next_arrival_s() is not None or self._engine.has_work():
            self._admit()
            if not self._engine.has_work():
                self._now = max(self._now, ledger.next_arrival_s() or 0.0)
                continue
            idle_steps = 0 if self._step() else idle_steps + 1
            assert idle_steps < _MAX_IDLE_STEPS, "the scheduler does not get on"
        result.duration_s = self._now
        result.num_preemptions = self._engine.num_preemptions
        return result

    def _admit(self) -> None:
        """Send what is due, as far as clients may."""
        while self._interruptions and self._interruptions[0][0] <= self._now:
            self._interruptions.popleft()[1]()
        for request in self._ledger.take_due(self._now):
            self._engine.add(request.make())

    def _wait(self) -> None:
        """Let the time pass until something comes from a tier, or somebody asks."""
        times = [time for time in (self._engine.next_s(),) if time is not None]
        arrival = self._ledger.next_arrival_s()
        if times and arrival is not None and self._ledger.has_room():
            times.append(arrival)
        if times:
            self._now = max(self._now, min(times))

    def _step(self) -> bool:
        """Run one step; returns whether it computed anything."""
        step, shape = self._engine.schedule()
        if step.total_num_scheduled_tokens:
            self._now += self._cost.seconds(shape)
            self._ledger.result.num_steps += 1
        else:
            self._wait()
        for output in self._engine.finish(step):
            self._ledger.take(output, self._now)
        return bool(step.total_num_scheduled_tokens)
