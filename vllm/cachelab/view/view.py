"""A view of a working cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.cachelab.view.log import SPAN_S, Admission, CacheLog, TimeSpan
from vllm.cachelab.view.sources import HELD, Share, make_source
from vllm.cachelab.view.tree import Tree, TreeBuilder
from vllm.v1.core.kv_cache_coordinator import as_served
from vllm.v1.kv_offload.tier_view import TiersView

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

MAX_BRANCHES = 300


class Snapshot(msgspec.Struct, frozen=True):
    """What the cache holds at one moment.

    Attributes:
        now_s: Of the clock that admissions are stamped by.
        unit: Tokens of the smallest hit.
        num_blocks: Of the pool, less the null block.
        block_bytes: Of one of them, in all layers.
        tiers: Blocks by where they stand; "held": by requests.
        policy: What a policy that learns has learnt.
        totals: Requests, prompt tokens and cached ones since the start.
        sources: Those cached ones by where they came from.
        history: The same over time.
        span_s: Seconds of a span of it.
        shares: What tenants have of the pool; none: it is everybody's.
        offload: The tiers behind the pool; None: there are none.
        admissions: The last ones, the newest first.
        took_ms: To look all this up.
    """

    now_s: float
    unit: int
    num_blocks: int
    block_bytes: int
    tiers: dict[str, int]
    num_running: int
    num_waiting: int
    policy: dict[str, Any]
    totals: dict[str, int]
    sources: dict[str, int]
    history: list[TimeSpan]
    span_s: float
    shares: list[Share]
    offload: TiersView | None
    tree: Tree
    admissions: list[Admission]
    took_ms: float


class CacheView:
    """Watches the steps of a scheduler, and tells what its cache holds when asked.

    Owns: the log.

    Args:
        scheduler: The one to watch; it does not know.
        clock: Monotonic seconds.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._source = make_source(scheduler.kv_cache_manager)
        config = scheduler.kv_cache_manager.kv_cache_config
        num_bytes = sum(tensor.size for tensor in config.kv_cache_tensors)
        self._block_bytes = num_bytes // config.num_blocks
        self.log = CacheLog(self._source)
        self._clock = clock

    def note_step(self, step: SchedulerOutput) -> None:
        """Note the requests that a step admitted, and those that ended since the one before."""
        if step.finished_req_ids:
            self.log.sweep(self._clock())
        for new in step.scheduled_new_reqs:
            request = self._scheduler.requests[new.req_id]
            if request.prefill_stats is not None:
                self.log.admit(request, request.prefill_stats, self._clock())

    def snapshot(self) -> Snapshot:
        """Return what the cache holds; takes time in proportion to that."""
        scheduler, log = self._scheduler, self.log
        began, now_s = time.perf_counter(), self._clock()
        log.sweep(now_s)
        pool = self._source.pool
        kept = as_served(scheduler.kv_cache_manager.coordinator).held.places()
        tree = TreeBuilder(self._source, log, now_s, kept).build(MAX_BRANCHES)
        num_running, num_waiting = scheduler.get_request_counts()
        num_usable = pool.num_gpu_blocks - 1
        tiers = {HELD: num_usable - pool.get_num_free_blocks(), **self._source.free_by_tier()}
        totals, connector = log.totals, scheduler.connector
        return Snapshot(
            now_s=now_s,
            unit=self._source.unit,
            num_blocks=num_usable,
            block_bytes=self._block_bytes,
            tiers=tiers,
            num_running=num_running,
            num_waiting=num_waiting,
            policy=self._describe_policy(),
            totals={
                "requests": totals.requests,
                "prompt_tokens": totals.prompt_tokens,
                "cached_tokens": totals.cached_tokens,
            },
            sources=dict(totals.sources),
            history=list(log.history),
            span_s=SPAN_S,
            shares=self._source.shares(),
            offload=None if connector is None else connector.hooks.view_tiers(),
            tree=tree,
            admissions=list(reversed(log.admissions)),
            took_ms=(time.perf_counter() - began) * 1e3,
        )

    def _describe_policy(self) -> dict[str, Any]:
        stats = self._scheduler.kv_cache_manager.coordinator.policy_stats()
        return {} if stats is None else {"rule": stats.rule, "interval": stats.interval}
