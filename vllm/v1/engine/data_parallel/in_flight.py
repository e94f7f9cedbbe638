"""What a front end has sent to its engine cores and not got back yet."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Sent:
    """A request in flight.

    Attributes:
        rank: The core that has it.
        hashes: Of its prompt's units, until the prompt is computed.
        backlog_tokens: Of its prompt, tokens to compute, until then.
    """

    rank: int
    hashes: Sequence[int]
    backlog_tokens: int


class InFlight:
    """Owns: the requests in flight, and the prefixes that cores are about to compute for them.

    A prefix in the making counts as cached: who comes with it waits for it there, and computes it
    anew anywhere else.

    Args:
        num_cores: How many there are.
    """

    def __init__(self, num_cores: int) -> None:
        self._sent: dict[str, Sent] = {}
        self._pending: list[Counter[int]] = [Counter() for _ in range(num_cores)]
        self._num_requests = [0] * num_cores
        self._backlog_tokens = [0] * num_cores

    def add(self, request_id: str, rank: int, hashes: Sequence[int], backlog_tokens: int) -> None:
        """Note that a request was sent."""
        self._sent[request_id] = Sent(rank, hashes, backlog_tokens)
        self._pending[rank].update(hashes)
        self._num_requests[rank] += 1
        self._backlog_tokens[rank] += backlog_tokens

    def note_computed(self, request_id: str) -> None:
        """Note that a prompt is computed: what it cached is known from the core now."""
        sent = self._sent.get(request_id)
        if sent is None or (not sent.backlog_tokens and not sent.hashes):
            return
        self._backlog_tokens[sent.rank] -= sent.backlog_tokens
        pending = self._pending[sent.rank]
        for short in sent.hashes:
            if pending[short] > 1:
                pending[short] -= 1
            else:
                del pending[short]
        sent.hashes, sent.backlog_tokens = (), 0

    def remove(self, request_id: str) -> int | None:
        """Forget a request; return the core that had it, None: it is unknown."""
        self.note_computed(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return None
        self._num_requests[sent.rank] -= 1
        return sent.rank

    def take_all(self, rank: int) -> list[str]:
        """Forget everything that a core has; return the requests."""
        ids = [request_id for request_id, sent in self._sent.items() if sent.rank == rank]
        for request_id in ids:
            self.remove(request_id)
        return ids

    def num_requests(self, rank: int) -> int:
        """Return how many requests a core has."""
        return self._num_requests[rank]

    def backlog_tokens(self, rank: int) -> int:
        """Return how many prompt tokens a core has yet to compute."""
        return self._backlog_tokens[rank]

    def num_pending_units(self, rank: int, hashes: Sequence[int]) -> int:
        """Return how many leading units of a prompt a core is about to compute."""
        pending = self._pending[rank]
        if not pending:
            return 0
        for i, short in enumerate(hashes):
            if short not in pending:
                return i
        return len(hashes)
