"""What the scheduler counts in a step, and hit rates over recent requests.

All dataclasses here cross the process border through msgspec.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixCacheStats:
    """Prefix-cache lookups since the last report, in tokens; a scheduler counts admissions.

    Attributes:
        reset: Whether the cache was reset in this interval: earlier counts no longer apply.
        requests: First-time requests looked up.
        queries: Their tokens.
        hits: Of those, tokens found in the cache.
        preempted_requests: Preempted requests looked up again; kept apart because what they find
            is mostly their own.
        preempted_queries: Their tokens.
        preempted_hits: Of those, tokens found in the cache.
        miss_tokens: Tokens of first-time requests by reason of their miss; of admissions
            ``hits + sum(miss_tokens.values()) == queries``, exactly.
        rebuild_saved_tokens: Of ``hits``, tokens beyond the deepest checkpoint, hit because window
            rows above them were computed again.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    miss_tokens: dict[str, int] = field(default_factory=dict)
    rebuild_saved_tokens: int = 0

    def record(
        self,
        num_tokens: int,
        num_hits: int,
        preempted: bool,
        miss_tokens: Mapping[str, int] | None = None,
        rebuild_saved_tokens: int = 0,
    ) -> None:
        """Count one lookup.

        Args:
            num_tokens: Tokens looked up.
            num_hits: Tokens found.
            preempted: Whether the request had been scheduled before.
            miss_tokens: The tokens not found, by reason.
            rebuild_saved_tokens: Of those found, tokens beyond the deepest checkpoint.
        """
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
            self.rebuild_saved_tokens += rebuild_saved_tokens
            for reason, count in (miss_tokens or {}).items():
                self.miss_tokens[reason] = self.miss_tokens.get(reason, 0) + count


class CachingMetrics:
    """Hit rate over the most recent requests.

    Owns: the window of per-interval counts and their sums.

    Args:
        max_recent_requests: Requests the window covers. Counts come in whole intervals and the
            newest interval always stays, so the window may hold more.
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        # (requests, queries, hits) per interval, oldest first.
        self.query_queue: deque[tuple[int, int, int]] = deque()

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one interval; an interval without requests changes nothing but may reset."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self.query_queue.append((stats.requests, stats.queries, stats.hits))
        self.aggregated_requests += stats.requests
        self.aggregated_query_total += stats.queries
        self.aggregated_query_hit += stats.hits
        while len(self.query_queue) > 1 and self.aggregated_requests > self.max_recent_requests:
            requests, queries, hits = self.query_queue.popleft()
            self.aggregated_requests -= requests
            self.aggregated_query_total -= queries
            self.aggregated_query_hit -= hits

    def reset(self) -> None:
        """Forget everything observed."""
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        self.query_queue.clear()

    @property
    def empty(self) -> bool:
        """Whether nothing has been observed."""
        return self.aggregated_requests == 0

    @property
    def hit_rate(self) -> float:
        """Share of the window's tokens found in the cache, 0 when there were none."""
        if self.aggregated_query_total == 0:
            return 0.0
        return self.aggregated_query_hit / self.aggregated_query_total


@dataclass(frozen=True, slots=True)
class KVCacheEvictionEvent:
    """The life of one sampled block, in seconds.

    Attributes:
        lifetime_seconds: From allocation to eviction.
        idle_seconds: From the last use to eviction.
        reuse_gaps_seconds: Between its last uses, oldest first.
    """

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


@dataclass(slots=True)
class SpecDecodingStats:
    """Draft tokens proposed and accepted since the last report.

    Attributes:
        num_spec_tokens: Most tokens a draft may hold.
        num_drafts: Drafts verified.
        num_draft_tokens: Tokens in them.
        num_accepted_tokens: Of those, tokens the model agreed with.
        num_accepted_tokens_per_pos: The same by position in the draft, ``num_spec_tokens`` long.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_spec_tokens: int) -> SpecDecodingStats:
        """Return empty counts for drafts of up to ``num_spec_tokens`` tokens."""
        return cls(num_spec_tokens, num_accepted_tokens_per_pos=[0] * num_spec_tokens)

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft; acceptance is a prefix of the draft."""
        assert num_accepted_tokens <= self.num_spec_tokens
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1


@dataclass(frozen=True, slots=True)
class CachePolicyStats:
    """What retention ``auto`` has learnt, and what it has done with the blocks.

    Attributes:
        rule: The eviction rule in force.
        interval: Tokens between two checkpoints that prompts leave; 0: none.
        spare_share: Share of the blocks that hold checkpoints nobody asked for, 0..1.
        proven_share: Of the free blocks that may be hit, those that were, or came back, 0..1.
    """

    rule: str
    interval: int
    spare_share: float = 0.0
    proven_share: float = 0.0


@dataclass(slots=True)
class OffloadStats:
    """What tiers behind the pool did since the last report, and what they hold now.

    Attributes:
        stores: Objects by what became of them: stored, failed, no_room, over_budget, unproven,
            superseded, dropped, evicted.
        restores: Prefixes by what became of them: restored, declined, corrupt, failed, cancelled.
        queries: Objects asked for by tier ("host", "disk").
        hits: Of those, objects that were there.
        read_bytes: Bytes brought back by tier.
        read_seconds: Seconds from the orders on, by tier.
        write_bytes: Bytes written by tier.
        write_seconds: Processor seconds of writing, by tier.
        num_corrupt: Objects whose bytes were not those that were written.
        capacity_bytes: By tier, what its slots take.
        used_bytes: By tier, of slots in use.
        live_bytes: By tier, of objects that can be found.
    """

    stores: dict[str, int] = field(default_factory=dict)
    restores: dict[str, int] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    read_bytes: dict[str, int] = field(default_factory=dict)
    read_seconds: dict[str, float] = field(default_factory=dict)
    write_bytes: dict[str, int] = field(default_factory=dict)
    write_seconds: dict[str, float] = field(default_factory=dict)
    num_corrupt: int = 0
    capacity_bytes: dict[str, int] = field(default_factory=dict)
    used_bytes: dict[str, int] = field(default_factory=dict)
    live_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, later: OffloadStats) -> None:
        """Add what was done since, and take over what is held now."""
        for counts, more in (
            (self.stores, later.stores),
            (self.restores, later.restores),
            (self.queries, later.queries),
            (self.hits, later.hits),
            (self.read_bytes, later.read_bytes),
            (self.write_bytes, later.write_bytes),
        ):
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count
        for times, longer in (
            (self.read_seconds, later.read_seconds),
            (self.write_seconds, later.write_seconds),
        ):
            for name, seconds in longer.items():
                times[name] = times.get(name, 0.0) + seconds
        self.num_corrupt += later.num_corrupt
        self.capacity_bytes = later.capacity_bytes
        self.used_bytes, self.live_bytes = later.used_bytes, later.live_bytes


@dataclass(slots=True)
class PullStats:
    """What a core pulled of its neighbours' caches before anybody asked for it.

    Attributes:
        num_prefixes: That came.
        num_tokens: Of these.
        num_bytes: Of their blocks that were not here already.
        num_failed: Prefixes that did not come.
        seconds: From its beginning to its end.
    """

    num_prefixes: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class SchedulerStats:
    """The scheduler's state after a step.

    Attributes:
        num_running_reqs: Requests with blocks that are scheduled step by step.
        num_waiting_reqs: Requests ready but not admitted.
        num_skipped_waiting_reqs: Requests that wait for something other than room.
        kv_cache_usage: Share of the blocks that requests hold, 0..1.
        prefix_cache_stats: Where the tokens of requests admitted since the last report came from;
            what a KV connector loads counts as a hit.
        connector_prefix_cache_stats: Lookups beyond it through the KV connector, if any.
        spec_decoding_stats: None when nothing was drafted.
        cache_policy: None where nothing is learnt: a fixed interval, or hits at whole blocks.
        kv_cache_eviction_events: Lives of sampled blocks that ended since the last report.
        offload: What tiers behind the pool did; None: there are none, or nothing happened.
        pulled: What was pulled of neighbours' caches; None: nothing since the last report.
        num_item_queries, num_item_hits: Pictures looked up since the last report, and those whose
            rows were there.
        encoder_s: Seconds that towers have run since the last report.
        is_lost: Whether there was no step: the core died, and other cores go on.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    spec_decoding_stats: SpecDecodingStats | None = None
    cache_policy: CachePolicyStats | None = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = field(default_factory=list)
    offload: OffloadStats | None = None
    pulled: PullStats | None = None
    num_item_queries: int = 0
    num_item_hits: int = 0
    encoder_s: float = 0.0
    is_lost: bool = False
