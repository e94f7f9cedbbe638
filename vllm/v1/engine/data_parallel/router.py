"""Sends requests to engine cores: what is known of each, and the choice."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.exceptions import EngineCoreLostError, EngineDeadError
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.core.retention.donors import MIN_GAIN_TOKENS
from vllm.v1.engine.data_parallel.directory import CacheShape, PrefixDirectory, fill_bits
from vllm.v1.engine.data_parallel.in_flight import InFlight
from vllm.v1.engine.data_parallel.policy import Counts, Loads, choose
from vllm.v1.engine.data_parallel.recent_work import RecentWork
from vllm.v1.engine.data_parallel.short_hash import shorten_all, shorten_kept
from vllm.v1.engine.data_parallel.updates import UpdateFollower
from vllm.v1.engine.wire import CoreStatus, KVCacheInfo
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, PrefillStats
from vllm.v1.request import Request

RoutingPolicy = Literal["prefix", "round-robin"]
# A hit that came as it was foretold.
EXACT = "exact"
PromptHasher = Callable[[EngineCoreRequest], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What a router is told once.

    Attributes:
        shape: Of every core's cache.
        num_cores: How many there are.
        max_num_seqs: Requests that a core runs at a time.
        num_blocks: Of each core's cache.
        tokens_per_block: About how many tokens' rows a block id holds.
        policy: "prefix", or "round-robin" to compare with.
        max_prefixes: Bound of the directory, over all groups and cores.
    """

    shape: CacheShape
    num_cores: int
    max_num_seqs: int
    num_blocks: int
    tokens_per_block: float
    policy: RoutingPolicy = "prefix"
    max_prefixes: int = 16_000_000

    @classmethod
    def from_config(cls, config: VllmConfig, info: KVCacheInfo) -> "RouterSettings":
        """Take them from an engine's configuration and what a core says of its cache."""
        parallel = config.parallel_config
        return cls(
            CacheShape.from_info(info),
            parallel.data_parallel_size,
            config.scheduler_config.max_num_seqs,
            info.num_blocks,
            info.capacity_tokens / max(1, info.num_blocks),
            parallel.data_parallel_routing,
        )


class Router:
    """Chooses a replica for each request, and remembers where it went. Any thread may call.

    Owns: the directory of prefixes, what is in flight, what the replicas said last.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        num = settings.num_cores
        self._lock = threading.Lock()
        self._directory = PrefixDirectory(settings.shape, num, settings.max_prefixes)
        # What tiers behind the caches hold; None: nobody said that there are any.
        self._kept: PrefixDirectory | None = None
        self._in_flight = InFlight(num)
        self._followers = [UpdateFollower() for _ in range(num)]
        # As the replicas said last.
        self._serves = np.ones(num, np.bool_)
        self._is_sure = np.ones(num, np.bool_)
        self._is_heard = np.ones(num, np.bool_)
        self._believes_all = True
        self._unused_tokens = np.full(num, self._tokens_of(settings.num_blocks))
        self._recent = RecentWork(num, self._tokens_of(settings.num_blocks))
        # What was foretold of requests whose prompt is not computed yet, and who waits.
        self._predicted: dict[str, tuple[int, str]] = {}
        self._next = 0

    def _tokens_of(self, num_blocks: int) -> int:
        return int(num_blocks * self._settings.tokens_per_block)

    # ---- the choice --------------------------------------------------------------------------

    def route(self, request: EngineCoreRequest) -> int:
        """Return the rank that gets a request, and count it there until it ends.

        Args:
            request: With the hashes of its prompt, if prefixes shall count.

        Raises:
            EngineCoreLostError: The core that it names is dead.
            EngineDeadError: All are.
        """
        hashes = shorten_all(request.block_hashes)
        kept = () if self._kept is None else [*map(shorten_kept, request.block_hashes)]
        return self.route_prompt(
            request.request_id,
            hashes,
            len(request.prompt_token_ids),
            request.options.data_parallel_rank,
            kept,
            request.options.routing_key,
            request.tenant,
            publishes=not request.options.skip_cache_insert,
        )

    def route_prompt(
        self,
        request_id: str,
        hashes: Sequence[int],
        num_tokens: int,
        wanted: int | None = None,
        kept_hashes: Sequence[int] = (),
        key: int | None = None,
        tenant: str | None = None,
        *,
        publishes: bool = True,
    ) -> int:
        """Return the rank that gets a prompt; see ``route``.

        Args:
            request_id: Its name.
            hashes: Of its units, 64 bits each.
            num_tokens: Of the prompt.
            wanted: The rank that it must have; None: any.
            kept_hashes: Of its units, as tiers behind the caches name them.
            key: What related requests share, 64 bits; see ``policy``.
            tenant: Whose it is, where replicas serve tenants in fair shares; None: nobody's.
            publishes: Whether others may hit what it computes; else it waits for nobody either.
        """
        with self._lock:
            cached = self._directory.find_cached_tokens(hashes, num_tokens)
            if not self._believes_all:
                cached *= self._is_sure & self._is_heard
            pending = self._count_pending(cached, hashes, num_tokens) if publishes else None
            soon = cached if pending is None else pending
            restorable = None
            if kept_hashes and self._kept is not None:
                found = self._kept.find_cached_tokens(kept_hashes, num_tokens)
                restorable = np.maximum(found * self._is_heard - soon, 0)
            rank = self._choose(wanted, soon, num_tokens, restorable, key, tenant)
            predicted = int(cached[rank])
            if soon[rank] > predicted:
                predicted = self._foretell(rank, hashes, num_tokens, predicted)
            doubt = "" if self._is_sure[rank] and self._is_heard[rank] else "unsure"
            if predicted > cached[rank]:
                doubt = "waited"
            self._predicted[request_id] = (predicted, doubt)
            self._in_flight.add(
                request_id,
                rank,
                hashes if publishes else (),
                num_tokens - predicted,
                int(cached[rank]) // self._settings.shape.unit,
                tenant,
            )
            self._recent.add(rank, num_tokens - predicted)
        return rank

    def _count_pending(
        self, cached: Counts, hashes: Sequence[int], num_tokens: int
    ) -> Counts | None:
        """Return tokens cached or about to be; None: nothing that this prompt has is."""
        pending = self._in_flight.find_pending(hashes)
        if not pending:
            return None
        unit, most = self._settings.shape.unit, num_tokens - 1
        # What everybody has changes nothing, as a common system prompt: arrays cost more than this.
        least = int(cached[cached.argmin()])
        if min(pending[0][0] * unit, most) <= least:
            return None
        tokens = np.zeros(len(cached), np.int64)
        for units, mask in pending:
            if min(units * unit, most) <= least:
                break
            fill_bits(tokens, mask, min(units * unit, most))
        return np.maximum(tokens, cached, out=tokens)

    def _foretell(self, rank: int, hashes: Sequence[int], num_tokens: int, cached: int) -> int:
        """Return what a prompt will hit at a core that computes others which begin alike.

        It waits for one that has not come to where the two part: that one leaves a place to resume
        there. Who has passed it, which the rows that it published show, leaves none.
        """
        unit = self._settings.shape.unit
        for units in self._in_flight.find_shared(rank, hashes):
            units = min(units, (num_tokens - 1) // unit)
            if units * unit - cached < MIN_GAIN_TOKENS:
                break
            if not self._directory.holds_rows(rank, hashes, units):
                return units * unit
        return cached

    def _choose(
        self,
        wanted: int | None,
        cached: Counts,
        num_tokens: int,
        restorable: Counts | None,
        key: int | None,
        tenant: str | None,
    ) -> int:
        if wanted is not None:
            if not self._serves[wanted]:
                raise EngineCoreLostError(
                    f"The engine core of data parallel rank {wanted} is dead: choose another, or "
                    "leave X-data-parallel-rank out."
                )
            return wanted
        if not self._serves[self._serves.argmax()]:
            raise EngineDeadError("Every engine core is dead.")
        if self._settings.policy == "round-robin":
            living = np.flatnonzero(self._serves)
            self._next += 1
            return int(living[(self._next - 1) % len(living)])
        in_flight, standing = self._in_flight, self._in_flight.standing_costs
        if tenant is not None:
            standing = in_flight.tenants.find_standing_costs(tenant)
        loads = Loads(
            self._serves,
            in_flight.num_requests,
            standing,
            self._unused_tokens,
            self._recent.tokens,
            self._recent.prices,
        )
        return choose(loads, cached, num_tokens, self._settings.max_num_seqs, restorable, key)

    # ---- what happens ------------------------------------------------------------------------

    def observe(self, rank: int, changes: CoreStatus, now: float | None = None) -> bool:
        """Take in what a core says of its cache and its load.

        Returns:
            Whether it must say everything again (``TellAll``): something was lost.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            follower = self._followers[rank]
            heard = follower.take(changes, now)
            if heard.forgets:
                self._drop(rank)
            for change in heard.changes:
                self._directory.apply(rank, change)
                self._apply_kept(rank, change)
                self._in_flight.note_reported(rank, change.num_running + change.num_waiting)
                self._unused_tokens[rank] = self._tokens_of(change.num_unused_blocks)
            if self._is_sure[rank] != follower.is_sure:
                self._is_sure[rank] = follower.is_sure
                self._note_beliefs()
        return heard.asks

    def _note_beliefs(self) -> None:
        self._believes_all = bool(self._is_sure.all() and self._is_heard.all())

    def _drop(self, rank: int) -> None:
        for directory in (self._directory, self._kept):
            if directory is not None:
                directory.drop(rank)

    def _apply_kept(self, rank: int, change: CoreStatus) -> None:
        """Take in what a core says of the tiers behind its cache."""
        if self._kept is None:
            if not change.kept_step:
                return
            settings = self._settings
            shape = CacheShape(settings.shape.unit, (change.kept_step, 0))
            self._kept = PrefixDirectory(shape, len(self._serves), settings.max_prefixes)
        own = CoreStatus(0, 0, 0, change.is_cleared, stored=change.kept, removed=change.unkept)
        self._kept.apply(rank, own)

    def check_updates(self, now: float | None = None) -> list[int]:
        """Return the cores that must say everything again, now; to be called now and then."""
        now = time.monotonic() if now is None else now
        with self._lock:
            asked = [rank for rank, f in enumerate(self._followers) if f.check(now)]
            for rank in asked:
                self._is_sure[rank] = False
            self._note_beliefs()
        return asked

    def take_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Note whose prompt is computed now, and who ended.

        Mutates:
            The prefill statistics among the outputs: they get what had been foretold.
        """
        with self._lock:
            for output in outputs:
                foretold = self._predicted.get(output.request_id)
                if foretold is not None and output.prefill_stats is not None:
                    output.prefill_stats = _compare(output.prefill_stats, *foretold)
                if output.finished:
                    self._forget(output.request_id)
                else:
                    self._in_flight.note_computed(output.request_id)

    def foretold(self, request_id: str) -> int:
        """Return the hit foretold of a request whose prompt is not computed yet, in tokens."""
        with self._lock:
            return self._predicted[request_id][0]

    def _forget(self, request_id: str) -> int | None:
        self._predicted.pop(request_id, None)
        return self._in_flight.remove(request_id)

    def end(self, request_id: str) -> int | None:
        """Forget a request that ended; return the core that had it, None: it is unknown."""
        with self._lock:
            return self._forget(request_id)

    def lose(self, rank: int) -> list[str]:
        """Forget a core that died; return the requests that it had."""
        with self._lock:
            self._set_serving(rank, False)
            self._recent.forget(rank)
            self._drop(rank)
            self._followers[rank] = UpdateFollower()
            self._is_sure[rank] = self._is_heard[rank] = True
            self._note_beliefs()
            self._in_flight.note_reported(rank, 0)
            self._unused_tokens[rank] = self._tokens_of(self._settings.num_blocks)
            lost = self._in_flight.take_all(rank)
            for request_id in lost:
                self._predicted.pop(request_id, None)
            return lost

    def rest(self, rank: int) -> None:
        """Send a core nothing more; what it has goes on."""
        with self._lock:
            self._set_serving(rank, False)

    def doubt(self, rank: int) -> None:
        """Believe nothing of a core's cache until ``trust``: nothing is heard of it."""
        with self._lock:
            self._is_heard[rank] = False
            self._note_beliefs()

    def trust(self, rank: int) -> None:
        """Believe what a core said again: it is heard."""
        with self._lock:
            self._is_heard[rank] = True
            self._note_beliefs()

    def revive(self, rank: int) -> None:
        """Send requests to a core again."""
        with self._lock:
            self._set_serving(rank, True)

    def _set_serving(self, rank: int, serves: bool) -> None:
        self._serves[rank] = serves
        self._recent.set_serving(self._serves)

    def join(self) -> int:
        """Make room for one more core, which serves, and return its rank."""
        with self._lock:
            self._in_flight.add_replica()
            self._followers.append(UpdateFollower())
            full = self._tokens_of(self._settings.num_blocks)
            self._serves = np.append(self._serves, True)
            self._is_sure = np.append(self._is_sure, True)
            self._is_heard = np.append(self._is_heard, True)
            self._unused_tokens = np.append(self._unused_tokens, full)
            self._recent.add_replica()
            if self._kept is not None:
                self._kept.add_replica()
            return self._directory.add_replica()

    def living(self) -> list[int]:
        """Return the cores that serve."""
        with self._lock:
            return np.flatnonzero(self._serves).tolist()

    def num_alive(self, without: int | None = None) -> int:
        """Return how many cores serve, one of them left out."""
        return sum(rank != without for rank in self.living())


def _compare(stats: PrefillStats, predicted: int, doubt: str) -> PrefillStats:
    """Return where a prompt's tokens came from, with what had been foretold.

    Why they differ: "waited", the prefix was being computed for another request; "unsure", updates
    of the core were missing; "bypassed", the request reads no cache; "late", it was computed
    meanwhile, or updates were on their way; "evicted", it went meanwhile.
    """
    actual = stats.num_cached_tokens - stats.num_external_tokens
    if actual == predicted:
        outcome = EXACT
    elif stats.miss_tokens.get("bypassed"):
        outcome = "bypassed"
    else:
        outcome = doubt or ("late" if actual > predicted else "evicted")
    return msgspec.structs.replace(stats, predicted_tokens=predicted, prediction=outcome)


def make_prompt_hasher(config: VllmConfig, unit: int) -> PromptHasher | None:
    """Return the function that hashes a prompt as the cores do; None: they do not cache.

    Mutates: this process's ``NONE_HASH``, to the seed that the configuration hands the cores.
    """
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        return None
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hash_fn, cache.prefix_hash_seed)
    hasher = get_request_block_hasher(unit, hash_fn)

    def hash_prompt(request: EngineCoreRequest) -> Sequence[BlockHash]:
        # The core's own class: salt, adapter and media enter its hashes here as they do there.
        return Request.from_engine_core_request(request, hasher).block_hashes

    return hash_prompt


def with_hashes(request: EngineCoreRequest, hash_prompt: PromptHasher | None) -> EngineCoreRequest:
    """Return a request with the hashes of its prompt: nobody computes them again."""
    if hash_prompt is None or request.block_hashes:
        return request
    return msgspec.structs.replace(request, block_hashes=list(hash_prompt(request)))
