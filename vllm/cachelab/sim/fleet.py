"""Many simulated servers behind a balancer: streamed requests, late news, losses, restarts."""

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from vllm.benchmarks.draws import Draws
from vllm.cachelab.sim.balancers import Balancer, make_balancer
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import SimEngine
from vllm.cachelab.sim.requests import SimRequest
from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.sim.warm_up import PopularPrompts, WarmUp, find_cached, pull
from vllm.distributed.kv_events import NullEventPublisher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges, count_unused_blocks
from vllm.v1.engine.data_parallel.router import RouterSettings
from vllm.v1.engine.data_parallel.short_hash import shorten_all
from vllm.v1.engine.kv_cache_setup import describe_kv_cache
from vllm.v1.engine.wire import CoreStatus
from vllm.v1.messages import EngineCoreOutput, PrefillStats

_LOSS_STREAM = 47
# A server that came back counts as fresh for so long.
_FRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """A request and the conversation it belongs to."""

    request: SimRequest
    session: int


@dataclass(frozen=True, slots=True)
class Losses:
    """Servers that die at once.

    Attributes:
        count: How many, drawn.
        at_s: When.
        back_s: How long until they serve again, empty.
    """

    count: int
    at_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class Restarts:
    """All servers, one after another: nothing new, then gone when idle, then back, empty.

    Attributes:
        at_s: When the first begins.
        back_s: How long each is gone.
    """

    at_s: float
    back_s: float


@dataclass(slots=True)
class FleetResult:
    """What a run came to.

    Attributes:
        prompt_tokens: Of requests whose prompt was computed.
        cached_tokens: Of these, hit.
        ttft_s: Time to the first token, one a request.
        latency_s: Time to the last.
        num_retried: Requests sent again because their server died before they had a token.
        num_cut: Requests that had tokens when their server died.
        num_refused: Requests that no server can hold.
        outcomes: Requests by how their hit came out, beside the foretold one.
        missed_by: Tokens between what was foretold and what came, by reason.
        placed: Requests by server.
        duration_s: By the simulated clock.
        fresh_prompt_tokens: Of requests that servers got within a minute after they came back.
        fresh_cached_tokens: Of these, hit.
        pulled_bytes: By servers that came back, before they served.
        pulled_s: How long that took them.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    latency_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    num_retried: int = 0
    num_cut: int = 0
    num_refused: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    missed_by: Counter[str] = field(default_factory=Counter)
    placed: Counter[int] = field(default_factory=Counter)
    duration_s: float = 0.0
    fresh_prompt_tokens: int = 0
    fresh_cached_tokens: int = 0
    pulled_bytes: int = 0
    pulled_s: float = 0.0

    @property
    def fresh_hit_rate(self) -> float | None:
        """Of prompt tokens that servers got within a minute after they came back; None: none."""
        if not self.fresh_prompt_tokens:
            return None
        return self.fresh_cached_tokens / self.fresh_prompt_tokens

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    def ttft_ms(self, percent: float) -> float:
        """Return a percentile."""
        return float(np.percentile(self.ttft_s, percent)) * 1000 if self.ttft_s else float("nan")

    def note_prefill(self, stats: PrefillStats) -> None:
        """Count where a prompt's tokens came from, and whether that was foretold."""
        self.prompt_tokens += stats.num_prompt_tokens
        self.cached_tokens += stats.num_cached_tokens
        if stats.predicted_tokens is not None:
            self.outcomes[stats.prediction] += 1
            missed = abs(stats.num_cached_tokens - stats.predicted_tokens)
            self.missed_by[stats.prediction] += missed


@dataclass(slots=True)
class _Open:
    """A request that a client waits for."""

    load: FleetLoad
    rank: int
    first_s: float | None = None


class _Server:
    """One engine and the step it runs; another engine after each restart.

    Owns: the engine.
    """

    def __init__(self, make: Callable[[CacheChanges], SimEngine]) -> None:
        self._make = make
        self.starts = 0
        self.is_draining = False
        self.restart()

    def restart(self) -> None:
        """Begin anew, with an empty cache."""
        self.changes = CacheChanges(NullEventPublisher(), epoch=self.starts)
        self.engine = self._make(self.changes)
        self.step: SchedulerOutput | None = None
        self.is_up = True
        self.is_draining = False
        self.starts += 1


class SimFleet:
    """Servers side by side, each with a pool of its own, one clock, and a balancer in front.

    Owns: the servers, the balancer, the clock and what is to happen.

    Args:
        settings: Of each server.
        num_servers: How many.
        balancer: Its name.
        cost: Time of a step.
        decode_stride: Tokens a decode step brings.
        news_delay_s: How late the balancer hears of a step; 0: before its outputs.
        warm_up: What servers that come back pull of others' caches; None: they begin empty.
    """

    def __init__(
        self,
        settings: SimSettings,
        num_servers: int,
        balancer: str,
        cost: CostModel,
        decode_stride: int = 1,
        news_delay_s: float = 0.0,
        warm_up: WarmUp | None = None,
    ) -> None:
        self._cost = cost
        self._warm_up = warm_up
        self._popular = PopularPrompts()
        # By rank, what a server that stopped handed on to the one that takes its place.
        self._handed_on: dict[int, list[SimRequest]] = {}
        # By rank, until when a server counts as fresh.
        self._fresh_until: dict[int, float] = {}
        self._delay_s = news_delay_s
        # Once for all: resolved for each, a thousand servers would take a minute to make.
        base = settings.prepare(tells_events=True)
        self._servers = [
            _Server(lambda watch: SimEngine(settings, None, decode_stride, watch, base))
            for _ in range(num_servers)
        ]
        config = base.config
        info = describe_kv_cache(config, base.plan)
        # Not by the configuration: there may be more than the cores of one server.
        router = replace(RouterSettings.from_config(config, info), num_cores=num_servers)
        self._balancer: Balancer = make_balancer(balancer, router)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._open: dict[str, _Open] = {}
        self._held: list[FleetLoad] = []
        self.result = FleetResult()

    @property
    def hash_unit(self) -> int:
        """Tokens under one prefix hash."""
        return self._servers[0].engine.hash_unit

    # ---- what is to happen -------------------------------------------------------------------

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), action))

    def plan_losses(self, losses: Losses, seed: int = 0) -> None:
        """Have servers die, and come back empty."""
        draws = Draws(seed, _LOSS_STREAM)
        ranks = list(range(len(self._servers)))
        gone = [ranks.pop(draws.below(len(ranks))) for _ in range(min(losses.count, len(ranks)))]
        for rank in gone:
            self._at(losses.at_s, partial(self._lose, rank, losses.back_s))

    def plan_restarts(self, restarts: Restarts) -> None:
        """Have all servers restart, one after another."""
        self._at(restarts.at_s, lambda: self._drain(0, restarts.back_s))

    def run(self, loads: Iterator[FleetLoad], on_done: Callable[[], object] | None = None) -> None:
        """Serve requests, which come in order of time, to their ends."""
        self._on_done = on_done
        coming = next(loads, None)
        while coming is not None or self._open or self._held:
            arrival = coming.request.arrival_s if coming is not None else None
            if self._events and (arrival is None or self._events[0][0] <= arrival):
                self._now, _, action = heapq.heappop(self._events)
                action()
            elif coming is not None:
                self._now = max(self._now, coming.request.arrival_s)
                self._send(coming)
                coming = next(loads, None)
            else:
                raise AssertionError("requests are open and nothing happens any more")
        self.result.duration_s = self._now

    # ---- requests and steps ------------------------------------------------------------------

    def _send(self, load: FleetLoad) -> None:
        if not any(server.is_up and not server.is_draining for server in self._servers):
            # Clients wait for the first that is back.
            self._held.append(load)
            return
        request = load.request.make()
        hashes = shorten_all(request.block_hashes)
        name = load.request.request_id
        rank = self._balancer.route(name, hashes, load.request.num_prompt_tokens, load.session)
        self._open[name] = _Open(load, rank)
        self.result.placed[rank] += 1
        if self._warm_up is not None:
            self._popular.note(load.session, load.request, rank)
        server = self._servers[rank]
        server.engine.add(request)
        self._start(rank, server)

    def _start(self, rank: int, server: _Server) -> None:
        if server.step is None and server.is_up and server.engine.has_work():
            server.step, shape = server.engine.schedule()
            if server.changes.has_moved:
                self._tell(rank, server)
            computes = bool(server.step.total_num_scheduled_tokens)
            took_s = self._cost.seconds(shape) if computes else 0.0
            start = server.starts
            self._at(self._now + took_s, lambda: self._finish(rank, start))

    def _finish(self, rank: int, start: int) -> None:
        server = self._servers[rank]
        if server.starts != start or server.step is None:
            return  # it died meanwhile
        outputs = server.engine.finish(server.step)
        server.step = None
        self._tell(rank, server)
        self._balancer.take_step(outputs)
        for output in outputs:
            self._take(output)
        if server.is_draining and not server.engine.has_work():
            self._stop(rank)
        self._start(rank, server)

    def _tell(self, rank: int, server: _Server) -> None:
        scheduler = server.engine.scheduler
        unused = count_unused_blocks(scheduler.kv_cache_manager.block_pool)
        status = server.changes.take(*scheduler.get_request_counts(), unused)
        if status is None:
            return
        if self._delay_s:
            self._at(self._now + self._delay_s, lambda: self._hear(rank, status))
        else:
            self._hear(rank, status)

    def _hear(self, rank: int, status: CoreStatus) -> None:
        if self._balancer.observe(rank, status, self._now):
            server = self._servers[rank]
            server.changes.tell_all()
            self._tell(rank, server)

    def _take(self, output: EngineCoreOutput) -> None:
        waiting = self._open[output.request_id]
        result = self.result
        if output.prefill_stats is not None:
            result.note_prefill(output.prefill_stats)
            if self._now <= self._fresh_until.get(waiting.rank, -1.0):
                result.fresh_prompt_tokens += output.prefill_stats.num_prompt_tokens
                result.fresh_cached_tokens += output.prefill_stats.num_cached_tokens
        begun_s = waiting.load.request.arrival_s
        if output.new_token_ids and waiting.first_s is None:
            waiting.first_s = self._now
            result.ttft_s.append(self._now - begun_s)
        if output.finished:
            if waiting.first_s is None:
                result.num_refused += 1
            else:
                result.latency_s.append(self._now - begun_s)
            self._close(output.request_id)

    def _close(self, request_id: str) -> None:
        del self._open[request_id]
        if self._on_done is not None:
            self._on_done()

    # ---- servers come and go -----------------------------------------------------------------

    def _requests_of(self, rank: int) -> Sequence[tuple[str, _Open]]:
        return [(name, waiting) for name, waiting in self._open.items() if waiting.rank == rank]

    def _lose(self, rank: int, back_s: float) -> None:
        server = self._servers[rank]
        if not server.is_up:
            return
        self._balancer.lose(rank)
        was_draining = server.is_draining
        server.is_up, server.is_draining, server.step = False, False, None
        server.starts += 1
        if was_draining:
            self._restart_next(rank)
        self._at(self._now + back_s, lambda: self._come_back(rank, lambda: None))
        for name, waiting in self._requests_of(rank):
            if waiting.first_s is None:
                del self._open[name]
                self.result.num_retried += 1
                self._send(waiting.load)
            else:
                self.result.num_cut += 1
                self._close(name)

    def _come_back(self, rank: int, then: Callable[[], None]) -> None:
        """Begin anew; serve, and go on with what is to happen then, once the cache is warm."""
        server = self._servers[rank]
        server.restart()
        if self._warm_up is None:
            self._serve(rank, then)
            return
        server.is_up = False
        pulled, seconds = pull(server.engine, self._find_popular(rank), self._warm_up)
        self.result.pulled_bytes += pulled
        self.result.pulled_s += seconds
        self._at(self._now + seconds, lambda: self._serve(rank, then))

    def _serve(self, rank: int, then: Callable[[], None]) -> None:
        server = self._servers[rank]
        server.is_up = True
        self._balancer.revive(rank)
        self._tell(rank, server)
        self._fresh_until[rank] = self._now + _FRESH_S
        held, self._held = self._held, []
        for load in held:
            self._send(load)
        then()

    def _find_popular(self, rank: int) -> Iterator[SimRequest]:
        """Yield what a server had before it was stopped, then what its neighbours have."""
        yield from self._handed_on.pop(rank, ())
        for popular in self._popular.list_popular():
            other = self._servers[popular.rank]
            if popular.rank == rank or not other.is_up:
                continue
            found = find_cached(other.engine, popular.request)
            if found is not None:
                yield found

    def _drain(self, rank: int, back_s: float) -> None:
        server = self._servers[rank]
        self._back_s = back_s
        if not server.is_up:
            # It has died, and comes back anew.
            self._restart_next(rank)
            return
        self._balancer.rest(rank)
        server.is_draining = True
        if not server.engine.has_work() and server.step is None:
            self._stop(rank)

    def _stop(self, rank: int) -> None:
        server = self._servers[rank]
        server.is_up, server.is_draining = False, False
        server.starts += 1
        self._balancer.lose(rank)
        if self._warm_up is not None:
            mine = [
                popular.request for popular in self._popular.list_popular() if popular.rank == rank
            ]
            found = [find_cached(server.engine, request) for request in mine]
            self._handed_on[rank] = [request for request in found if request is not None]
        self._at(
            self._now + self._back_s,
            lambda: self._come_back(rank, lambda: self._restart_next(rank)),
        )

    def _restart_next(self, rank: int) -> None:
        if rank + 1 < len(self._servers):
            self._drain(rank + 1, self._back_s)
