"""What a front end has sent to its replicas and not got back yet."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vllm.v1.engine.data_parallel.policy import Counts, find_standing_cost
from vllm.v1.engine.data_parallel.tenant_loads import TenantLoads

# Of a prompt's units so many are marked, every such one behind them, and the last.
_MARK_EVERY = 8


@dataclass(slots=True)
class Sent:
    """A request in flight.

    Attributes:
        rank: The replica that has it.
        hashes: Of its prompt's units, until the prompt is computed.
        marks: Hashes that stand for its prompt, until the prompt is computed.
        backlog_tokens: Of its prompt, tokens to compute, until then.
        tenant: Whose it is; None: nobody's.
    """

    rank: int
    hashes: Sequence[int]
    marks: Sequence[int]
    backlog_tokens: int
    tenant: str | None = None


class InFlight:
    """Owns: the requests in flight, the prefixes that replicas are about to compute, their loads.

    A prefix in the making counts as cached: who comes with it waits for it there, and computes it
    anew anywhere else. Some of its units stand for it: the first eight, every eighth, the last.

    Args:
        num_replicas: How many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self._sent: dict[str, Sent] = {}
        # By replica, those whose prompt is not computed yet.
        self._computing: list[dict[str, Sent]] = [{} for _ in range(num_replicas)]
        # Who is about to have a unit, one bit each; and for how many further requests of a replica.
        self._holders: dict[int, int] = {}
        self._further: dict[tuple[int, int], int] = {}
        self._num_sent = [0] * num_replicas
        self._backlog_tokens = [0] * num_replicas
        self._num_reported = [0] * num_replicas
        self.tenants = TenantLoads(num_replicas)
        # What the policy asks of all at once: kept, since each event changes one replica's.
        self.num_requests: Counts = np.zeros(num_replicas, np.int64)
        self.standing_costs: Counts = np.zeros(num_replicas, np.int64)

    def add_replica(self) -> None:
        """Make room for one more."""
        self._computing.append({})
        self._num_sent.append(0)
        self._backlog_tokens.append(0)
        self._num_reported.append(0)
        self.tenants.add_replica()
        self.num_requests = np.append(self.num_requests, 0)
        self.standing_costs = np.append(self.standing_costs, 0)

    def _renew(self, rank: int) -> None:
        # What other front ends sent there shows in the report alone.
        number = max(self._num_sent[rank], self._num_reported[rank])
        self.num_requests[rank] = number
        self.standing_costs[rank] = find_standing_cost(number, self._backlog_tokens[rank])

    def note_reported(self, rank: int, num_requests: int) -> None:
        """Note how many requests a replica says it has, of all front ends."""
        if num_requests != self._num_reported[rank]:
            self._num_reported[rank] = num_requests
            self._renew(rank)

    def add(
        self,
        request_id: str,
        rank: int,
        hashes: Sequence[int],
        backlog_tokens: int,
        cached_units: int = 0,
        tenant: str | None = None,
    ) -> None:
        """Note that a request was sent.

        Args:
            request_id: Its name.
            rank: Who has it.
            hashes: Of its prompt's units.
            backlog_tokens: Of its prompt, tokens to compute.
            cached_units: Of its units, those that need not be computed.
            tenant: Whose it is; None: nobody's.
        """
        places = _marked(len(hashes))
        marks = [hashes[i] for i in places[bisect_left(places, cached_units) :]]
        self._sent[request_id] = sent = Sent(rank, hashes, marks, backlog_tokens, tenant)
        if tenant is not None:
            self.tenants.add(tenant, rank, backlog_tokens)
        self._computing[rank][request_id] = sent
        holders, bit = self._holders, 1 << rank
        if holders.keys().isdisjoint(marks):
            # Most often nobody else computes any of them. A unit that is marked twice is one.
            held_once = dict.fromkeys(marks, bit)
            holders.update(held_once)
            if len(held_once) < len(marks):
                self._note_repeated(marks, rank)
        else:
            for short in marks:
                held = holders.get(short, 0)
                if held & bit:
                    key = (rank, short)
                    self._further[key] = self._further.get(key, 0) + 1
                else:
                    holders[short] = held | bit
        self._num_sent[rank] += 1
        self._backlog_tokens[rank] += backlog_tokens
        self._renew(rank)

    def _note_repeated(self, marks: Sequence[int], rank: int) -> None:
        """Count units that stand for a prompt more than once."""
        seen: set[int] = set()
        for short in marks:
            if short in seen:
                key = (rank, short)
                self._further[key] = self._further.get(key, 0) + 1
            seen.add(short)

    def note_computed(self, request_id: str) -> None:
        """Note that a prompt is computed: what it cached is known from the replica now."""
        sent = self._sent.get(request_id)
        if sent is None or self._computing[sent.rank].pop(request_id, None) is None:
            return
        self._backlog_tokens[sent.rank] -= sent.backlog_tokens
        if sent.tenant is not None:
            self.tenants.note_computed(sent.tenant, sent.rank, sent.backlog_tokens)
        self._renew(sent.rank)
        holders, further, bit = self._holders, self._further, 1 << sent.rank
        for short in sent.marks:
            if further and (key := (sent.rank, short)) in further:
                if further[key] > 1:
                    further[key] -= 1
                else:
                    del further[key]
                continue
            held = holders[short]
            if held == bit:
                del holders[short]
            else:
                holders[short] = held ^ bit
        sent.hashes, sent.marks, sent.backlog_tokens = (), (), 0

    def remove(self, request_id: str) -> int | None:
        """Forget a request; return the replica that had it, None: it is unknown."""
        self.note_computed(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return None
        self._num_sent[sent.rank] -= 1
        if sent.tenant is not None:
            self.tenants.remove(sent.tenant, sent.rank)
        self._renew(sent.rank)
        return sent.rank

    def take_all(self, rank: int) -> list[str]:
        """Forget everything that a replica has; return the requests."""
        ids = [request_id for request_id, sent in self._sent.items() if sent.rank == rank]
        for request_id in ids:
            self.remove(request_id)
        return ids

    def find_pending(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Return leading units of a prompt, most first, and who is about to compute so many."""
        holders = self._holders
        if not holders:
            return []
        found: list[tuple[int, int]] = []
        known = 0
        for i in [i for i in _marked(len(hashes)) if hashes[i] in holders][::-1]:
            fresh = holders[hashes[i]] & ~known
            if fresh:
                found.append((i + 1, fresh))
                known |= fresh
        return found

    def find_shared(self, rank: int, hashes: Sequence[int]) -> list[int]:
        """Return how many leading units a prompt shares with those that a replica computes.

        Exactly, and most first; those that share none are left out.
        """
        found = {_count_shared(sent.hashes, hashes) for sent in self._computing[rank].values()}
        return sorted(found - {0}, reverse=True)


def _count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading hashes of two chains are equal: a hash stands for all before it."""
    if not one or not other or one[0] != other[0]:
        return 0
    low, high = 1, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache(4096)
def _marked(num_units: int) -> tuple[int, ...]:
    """Return which units stand for a prompt."""
    places = [*range(_MARK_EVERY), *range(2 * _MARK_EVERY - 1, num_units, _MARK_EVERY)]
    return tuple(sorted({i for i in places if i < num_units} | {num_units - 1} - {-1}))
