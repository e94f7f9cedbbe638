"""Fingerprints of answered requests: bounded in number, bytes and age."""

import time
from collections import OrderedDict
from collections.abc import Callable

from vllm.entrypoints.openai.diagnosis.fingerprint import Fingerprint


class FingerprintStore:
    """The requests that later ones may be compared with; the least recently used go first.

    A reset of the prefix cache does not concern it: it describes requests, not what is cached.

    Owns: the fingerprints, by the ids of their responses.

    Args:
        max_entries: How many to keep.
        max_bytes: How much to keep.
        max_age_s: For how long, since they were stored.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        max_entries: int,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._by_use: OrderedDict[str, Fingerprint] = OrderedDict()
        self._stored_at: OrderedDict[str, float] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._by_use)

    def put(self, response_id: str, fingerprint: Fingerprint) -> None:
        """Keep one, at the cost of others."""
        self._drop_expired()
        self.discard(response_id)
        self._by_use[response_id] = fingerprint
        self._stored_at[response_id] = self._clock()
        self._num_bytes += fingerprint.num_bytes
        while len(self._by_use) > self._max_entries or self._num_bytes > self._max_bytes:
            self.discard(next(iter(self._by_use)))

    def find(self, response_id: str, owner: bytes | None) -> Fingerprint | None:
        """Return a request's fingerprint; None: it is not here, or another owner's.

        Args:
            response_id: Of its answer.
            owner: Who may know it; None: the operator, who may know all and uses none.
        """
        self._drop_expired()
        found = self._by_use.get(response_id)
        if found is None or owner is None:
            return found
        if found.owner != owner:
            return None
        self._by_use.move_to_end(response_id)
        return found

    def discard(self, response_id: str) -> None:
        """Forget one, if it is here."""
        dropped = self._by_use.pop(response_id, None)
        if dropped is not None:
            del self._stored_at[response_id]
            self._num_bytes -= dropped.num_bytes

    def _drop_expired(self) -> None:
        oldest_allowed = self._clock() - self._max_age_s
        while self._stored_at and next(iter(self._stored_at.values())) < oldest_allowed:
            self.discard(next(iter(self._stored_at)))
