"""Sends requests to engine cores: what is known of each, and the choice."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.engine.data_parallel.directory import CacheShape, PrefixDirectory
from vllm.v1.engine.data_parallel.in_flight import InFlight
from vllm.v1.engine.data_parallel.policy import Candidate, choose_core
from vllm.v1.engine.data_parallel.short_hash import shorten
from vllm.v1.engine.wire import CoreStatus, KVCacheInfo
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest
from vllm.v1.request import Request

RoutingPolicy = Literal["prefix", "round-robin"]
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
    """

    shape: CacheShape
    num_cores: int
    max_num_seqs: int
    num_blocks: int
    tokens_per_block: float
    policy: RoutingPolicy = "prefix"

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
    """Chooses a core for each request, and remembers where it went. Any thread may call.

    Owns: the directory of prefixes, what is in flight, what the cores said last.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        num_cores = settings.num_cores
        self._lock = threading.Lock()
        self._directory = PrefixDirectory(settings.shape, num_cores)
        self._in_flight = InFlight(num_cores)
        self._alive = [True] * num_cores
        # As the cores said last; the requests are those of all front ends.
        self._reported = [0] * num_cores
        self._unused_blocks = [settings.num_blocks] * num_cores
        self._placed_tokens = [0] * num_cores
        self._next = 0

    # ---- the choice --------------------------------------------------------------------------

    def route(self, request: EngineCoreRequest) -> int:
        """Return the rank that gets a request, and count it there until it ends.

        Args:
            request: With the hashes of its prompt, if prefixes shall count.

        Raises:
            EngineDeadError: The core that it names is dead, or all are.
        """
        hashes = [shorten(block_hash) for block_hash in request.block_hashes]
        num_tokens = len(request.prompt_token_ids)
        with self._lock:
            cached = self._find_cached_tokens(hashes, num_tokens)
            rank = self._choose(request.data_parallel_rank, cached, num_tokens)
            work = num_tokens - cached[rank]
            self._in_flight.add(request.request_id, rank, hashes, work)
            self._placed_tokens[rank] += work
        return rank

    def _find_cached_tokens(self, hashes: Sequence[int], num_tokens: int) -> list[int]:
        """Return what each core caches of a prompt, or is about to."""
        cached = self._directory.find_cached_tokens(hashes, num_tokens)
        unit, most = self._settings.shape.unit, num_tokens - 1
        for rank, known in enumerate(cached):
            pending = self._in_flight.num_pending_units(rank, hashes) * unit
            cached[rank] = max(known, min(pending, most))
        return cached

    def _choose(self, wanted: int | None, cached: Sequence[int], num_tokens: int) -> int:
        living = [rank for rank, alive in enumerate(self._alive) if alive]
        if wanted is not None:
            if not self._alive[wanted]:
                raise EngineDeadError(
                    f"The engine core of data parallel rank {wanted} is dead: choose another, or "
                    "leave X-data-parallel-rank out."
                )
            return wanted
        if not living:
            raise EngineDeadError("Every engine core is dead.")
        if self._settings.policy == "round-robin":
            self._next += 1
            return living[(self._next - 1) % len(living)]
        candidates = [self._describe(rank, cached[rank]) for rank in living]
        return choose_core(candidates, num_tokens, self._settings.max_num_seqs)

    def _describe(self, rank: int, cached_tokens: int) -> Candidate:
        own = self._in_flight.num_requests(rank)
        return Candidate(
            rank,
            cached_tokens,
            # What other front ends sent there shows in the report alone.
            max(own, self._reported[rank]),
            self._in_flight.backlog_tokens(rank),
            int(self._unused_blocks[rank] * self._settings.tokens_per_block),
            self._placed_tokens[rank],
        )

    # ---- what happens ------------------------------------------------------------------------

    def observe(self, rank: int, changes: CoreStatus) -> None:
        """Take in what a core says of its cache and its load."""
        with self._lock:
            self._directory.apply(rank, changes)
            self._reported[rank] = changes.num_running + changes.num_waiting
            self._unused_blocks[rank] = changes.num_unused_blocks

    def take_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Note whose prompt is computed now, and who ended."""
        with self._lock:
            for output in outputs:
                if output.finished:
                    self._in_flight.remove(output.request_id)
                else:
                    self._in_flight.note_computed(output.request_id)

    def end(self, request_id: str) -> int | None:
        """Forget a request that ended; return the core that had it, None: it is unknown."""
        with self._lock:
            return self._in_flight.remove(request_id)

    def lose(self, rank: int) -> list[str]:
        """Forget a core that died; return the requests that it had."""
        with self._lock:
            self._alive[rank] = False
            self._directory.drop(rank)
            self._reported[rank] = 0
            self._unused_blocks[rank] = self._settings.num_blocks
            return self._in_flight.take_all(rank)

    def revive(self, rank: int) -> None:
        """Send requests to a core again."""
        with self._lock:
            self._alive[rank] = True

    def living(self) -> list[int]:
        """Return the cores that serve."""
        with self._lock:
            return [rank for rank, alive in enumerate(self._alive) if alive]

    def num_alive(self, without: int | None = None) -> int:
        """Return how many cores serve, one of them left out."""
        with self._lock:
            return sum(alive for rank, alive in enumerate(self._alive) if rank != without)


def make_prompt_hasher(config: VllmConfig, hash_block_size: int) -> PromptHasher | None:
    """Return the function that hashes a prompt as the cores do; None: they do not cache.

    Mutates: this process's ``NONE_HASH``, to the seed that the configuration hands the cores.
    """
    cache = config.cache_config
    if not cache.enable_prefix_caching:
        return None
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hash_fn, cache.prefix_hash_seed)
    hasher = get_request_block_hasher(hash_block_size, hash_fn)

    def hash_prompt(request: EngineCoreRequest) -> Sequence[BlockHash]:
        # The core's own class: salt, adapter and media enter its hashes here as they do there.
        return Request.from_engine_core_request(request, hasher).block_hashes

    return hash_prompt


def with_hashes(request: EngineCoreRequest, hash_prompt: PromptHasher | None) -> EngineCoreRequest:
    """Return a request with the hashes of its prompt: nobody computes them again."""
    if hash_prompt is None or request.block_hashes:
        return request
    return msgspec.structs.replace(request, block_hashes=list(hash_prompt(request)))
