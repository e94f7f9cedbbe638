"""The recorded requests under other settings, at their times, by a clock fitted to the record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from vllm.cachelab.sim.clock import ClockedRun, SimResult
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import Acceptance, SimEngine
from vllm.cachelab.sim.grid import NO_CACHE, Variant
from vllm.cachelab.sim.settings import disk_bytes_of
from vllm.cachelab.trace.events import HeldSeen, Reset, SessionEnded
from vllm.cachelab.twin.exact import TwinResult
from vllm.cachelab.twin.rebuild import environment_of, make_request, settings_of
from vllm.cachelab.twin.tier import measured_rates, open_folder
from vllm.cachelab.twin.trace_file import CacheTrace, RecordedRequest
from vllm.config.speculative import SpeculativeConfig
from vllm.exceptions import ConfigError
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """One recorded request as a load.

    Attributes:
        recorded: As the trace has it.
        recorded_unit: Tokens under one recorded hash.
        unit: Tokens under one hash now.
        turn: None: a trace knows of no turns.
        has_eyes: Whether pictures are shown.
    """

    recorded: RecordedRequest
    recorded_unit: int
    unit: int
    turn: int | None = None
    has_eyes: bool = False

    @property
    def request_id(self) -> str:
        """As the engine core knew it."""
        return self.recorded.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Of its prompt."""
        return self.recorded.added.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """As many as it had when it ended, whoever ended it."""
        return max(1, self.recorded.num_output_tokens or 1)

    @property
    def arrival_s(self) -> float:
        """When it was queued."""
        return self.recorded.added.time_us / 1e6

    def make(self) -> Request:
        """Return the scheduler's request."""
        return make_request(
            self.recorded,
            self.recorded_unit,
            self.unit,
            self.num_output_tokens,
            has_eyes=self.has_eyes,
        )


def fit_cost(twin: TwinResult) -> CostModel:
    """Return the cost model of the machine that recorded.

    Raises:
        ConfigError: There are too few steps.
    """
    shapes = [shape for shape, seconds in twin.shapes if seconds > 0]
    return CostModel.fit(shapes, [seconds for _, seconds in twin.shapes if seconds > 0])


def fit_acceptance(trace: CacheTrace, twin: TwinResult) -> Acceptance:
    """Return how many drafts stood: the rate that gives the recorded tokens per decode.

    None where drafts were weighed, which a simulation leaves out.
    """
    fields = trace.header.speculative
    num_drafts = 0 if fields is None else SpeculativeConfig(**fields).usual_drafts
    num_decodes = sum(shape.decode_seqs for shape, _ in twin.shapes)
    if not num_drafts or not num_decodes:
        return Acceptance(0.0)
    extra = sum(count - 1 for step in trace.steps() for _, count in step.counts if count > 1)
    mean = extra / num_decodes
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        expected = sum(rate**i for i in range(1, num_drafts + 1))
        low, high = (rate, high) if expected < mean else (low, rate)
    return Acceptance(low)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What every setting of a grid replays.

    Attributes:
        trace: The recorded run.
        cost: Of its machine.
        acceptance: Of its drafts.
    """

    trace: CacheTrace
    cost: CostModel
    acceptance: Acceptance

    def run(self, variant: Variant) -> SimResult:
        """Replay under one setting."""
        header = self.trace.header
        base = settings_of(header)
        settings = variant.apply(base)
        if variant.block_size == base.block_size and variant.pool_bytes == base.pool_bytes:
            settings = replace(settings, num_blocks=base.num_blocks)
        pins = {"VLLM_PIN_SWA_TOKENS": "1" if variant.has_pins else "0"}
        with environment_of(header, pins):
            engine = SimEngine(settings, self.acceptance)
        if engine.tier is not None:
            engine.tier.use_rates(measured_rates(self.trace))
            if variant.block_size == base.block_size:
                open_folder(self.trace, engine.tier)
        load = [
            RecordedLoad(
                request,
                header.hash_unit,
                engine.hash_unit,
                has_eyes=header.images is not None,
            )
            for request in self.trace.requests.values()
        ]
        scheduler = engine.scheduler
        interruptions: list[tuple[float, Callable[[], object]]] = []
        for event in self.trace.events:
            if isinstance(event, Reset):
                act = partial(
                    scheduler.reset_prefix_cache, event.resets_running, event.resets_tiers
                )
                interruptions.append((event.time_us / 1e6, act))
            elif isinstance(event, HeldSeen):
                look = partial(scheduler.held_prefixes, event.forgotten)
                interruptions.append((event.time_us / 1e6, look))
            elif isinstance(event, SessionEnded):
                end = partial(scheduler.end_session, event.session)
                interruptions.append((event.time_us / 1e6, end))
        return ClockedRun(engine, self.cost, interruptions=interruptions).run(load)


def recorded_variant(trace: CacheTrace) -> Variant:
    """Return the settings that were recorded."""
    header = trace.header
    settings = settings_of(header)
    pinned = header.environment.get("VLLM_PIN_SWA_TOKENS") == "1"
    policy = str(settings.interval) + ("+pins" if pinned else "")
    if not settings.enable_prefix_caching:
        policy = NO_CACHE
    disk_bytes = disk_bytes_of(settings.tier)
    return Variant(policy, settings.block_size, settings.pool_bytes, disk_bytes)


def check_block_sizes(trace: CacheTrace, sizes: Sequence[int]) -> None:
    """Refuse block sizes that the trace says nothing of.

    Raises:
        ConfigError: One is no multiple of the recorded unit.
    """
    for size in sizes:
        if size % trace.header.hash_unit:
            raise ConfigError(
                f"The trace was recorded with --block-size {trace.header.hash_unit}: {size} is no "
                "multiple of it. Record with a smaller one to try it."
            )
