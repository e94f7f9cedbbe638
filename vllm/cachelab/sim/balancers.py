"""Who gets a request in front of simulated servers: our router, and what people put there today."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.wire import CoreStatus
from vllm.v1.messages import EngineCoreOutput

# Odd constants of a 64-bit mixer (splitmix64).
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
# Ways in which prompts may go on where a conversation ended: it was answered again, or edited.
_MAX_WAYS = 3


class Balancer(Protocol):
    """Sends requests to servers, by rank."""

    def route(self, request_id: str, hashes: Sequence[int], num_tokens: int, session: int) -> int:
        """Return who gets a request, and count it there.

        Args:
            request_id: Its name.
            hashes: Of its prompt's units, 64 bits each.
            num_tokens: Of its prompt.
            session: Number of the conversation it belongs to.
        """

    def observe(self, rank: int, status: CoreStatus, now: float) -> bool:
        """Take in what a server says; returns whether it must say everything again."""

    def take_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Note what a step brought; prefill statistics get what was foretold, if it was."""

    def rest(self, rank: int) -> None:
        """Send a server nothing more."""

    def lose(self, rank: int) -> None:
        """Forget a server that died."""

    def revive(self, rank: int) -> None:
        """Send a server requests again."""


class PrefixBalancer:
    """The router of servers and fleets.

    Owns: the router.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._router = Router(settings)
        self.observe = self._router.observe
        self.take_step = self._router.take_step
        self.rest = self._router.rest
        self.revive = self._router.revive

    def route(self, request_id: str, hashes: Sequence[int], num_tokens: int, session: int) -> int:
        """Return who gets a request; the conversation does not matter."""
        return self._router.route_prompt(request_id, hashes, num_tokens)

    def lose(self, rank: int) -> None:
        """Forget a server that died."""
        self._router.lose(rank)


Pick = Callable[["SimpleBalancer", Sequence[int], int], int]


class SimpleBalancer:
    """What needs no word from the servers.

    Owns: who serves, and the open requests of each.

    Args:
        num_servers: How many there are.
        pick: Chooses, from the prompt's hashes and the conversation.
    """

    def __init__(self, num_servers: int, pick: Pick) -> None:
        self.num_open = np.zeros(num_servers, np.int64)
        self.serves = np.ones(num_servers, np.bool_)
        self.turn = 0
        self._pick = pick
        self._sent: dict[str, int] = {}
        self._seeds = _mix(np.arange(1, num_servers + 1, dtype=np.uint64))

    def route(self, request_id: str, hashes: Sequence[int], num_tokens: int, session: int) -> int:
        """Return who gets a request, and count it there."""
        rank = self._pick(self, hashes, session)
        self._sent[request_id] = rank
        self.num_open[rank] += 1
        return rank

    def by_hash(self, key: int) -> int:
        """Return the server of a key: another one only when its own is gone (highest random
        weight)."""
        weights = _mix(self._seeds ^ np.uint64(key & _MASK))
        return int(np.argmax(np.where(self.serves, weights, 0)))

    def observe(self, rank: int, status: CoreStatus, now: float) -> bool:
        """Pass over what a server says."""
        return False

    def take_step(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Note who ended."""
        for output in outputs:
            if output.finished:
                self.num_open[self._sent.pop(output.request_id)] -= 1

    def rest(self, rank: int) -> None:
        """Send a server nothing more."""
        self.serves[rank] = False

    def lose(self, rank: int) -> None:
        """Forget a server that died."""
        self.rest(rank)
        self.num_open[rank] = 0
        self._sent = {name: r for name, r in self._sent.items() if r != rank}

    def revive(self, rank: int) -> None:
        """Send a server requests again."""
        self.serves[rank] = True


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(_MIX[0])
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX[1])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX[2])
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _round_robin(balancer: SimpleBalancer, _hashes: Sequence[int], _session: int) -> int:
    living = np.flatnonzero(balancer.serves)
    balancer.turn += 1
    return int(living[(balancer.turn - 1) % len(living)])


def _least_load(balancer: SimpleBalancer, _hashes: Sequence[int], _session: int) -> int:
    most = np.iinfo(np.int64).max
    return int(np.argmin(np.where(balancer.serves, balancer.num_open, most)))


def _session_affinity(balancer: SimpleBalancer, _hashes: Sequence[int], session: int) -> int:
    return balancer.by_hash(session)


def _first_block(balancer: SimpleBalancer, hashes: Sequence[int], session: int) -> int:
    return balancer.by_hash(hashes[0] if hashes else session)


_SIMPLE: dict[str, Pick] = {
    "round-robin": _round_robin,
    "least-load": _least_load,
    "session": _session_affinity,
    "first-block": _first_block,
}


def make_balancer(name: str, settings: RouterSettings) -> Balancer:
    """Return a balancer by name, for the servers that a router's settings describe."""
    if name == "prefix":
        return PrefixBalancer(settings)
    return SimpleBalancer(settings.num_cores, _SIMPLE[name])


class Sessions:
    """Numbers the conversations of a trace: a prompt goes on where an earlier one ended.

    A prompt that ends with what many others begin with, such as a system prompt sent alone, is no
    conversation's end: what goes on there in more than a few ways begins anew.

    Owns: where conversations ended, and how prompts went on there.
    """

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        # By end, the spans that followed; a common beginning needs none any more.
        self._further: dict[int, set[int]] = {}
        self._common: set[int] = set()
        self.sizes: Counter[int] = Counter()

    def find(self, span_ids: Sequence[int], num_full: int) -> int:
        """Return the conversation of a prompt.

        Args:
            span_ids: One id a span of tokens, each standing for all before it too.
            num_full: How many of them are full.
        """
        full = span_ids[:num_full]
        session = self._follow(span_ids, num_full)
        if session is None:
            session = len(self.sizes)
        if full and full[-1] not in self._common:
            self._ends[full[-1]] = session
        self.sizes[session] += 1
        return session

    def _follow(self, span_ids: Sequence[int], num_full: int) -> int | None:
        """Return the conversation that a prompt goes on with; None: none."""
        for place in range(num_full - 1, -1, -1):
            end = span_ids[place]
            if end not in self._ends:
                continue
            if place + 1 < len(span_ids):
                ways = self._further.setdefault(end, set())
                ways.add(span_ids[place + 1])
                if len(ways) > _MAX_WAYS:
                    self._common.add(end)
                    del self._ends[end], self._further[end]
                    continue
            return self._ends[end]
        return None
