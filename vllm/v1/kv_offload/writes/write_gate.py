"""Which objects go to the disk, and when: the write policy, the daily budget, the turnover."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vllm.config.kv_transfer import SELECTIVE, WRITE_BACK
from vllm.v1.kv_offload.writes.tracking import Candidate
from vllm.v1.kv_offload.writes.turnover import SeenObjects, Turnover
from vllm.v1.kv_offload.writes.write_budget import WriteBudget

# Objects that wait; the oldest go first, whose rows the pool gives up first too.
_MAX_WAITING = 8192


class WriteGate:
    """Lets objects go to the disk.

    write_through            at once
    write_through_selective  when a second request has computed or hit them
    write_back               when the pool runs short of unused blocks, and at the end

    Owns: what waits to be written, and what was seen once.

    Args:
        policy: One of these.
        budget: What may be written a day. While it is scarce, everything is selective.
        is_short: Whether the pool runs short of unused blocks.
        count_bytes: Returns an object's size on the disk.
    """

    def __init__(
        self,
        policy: str,
        budget: WriteBudget,
        is_short: Callable[[], bool],
        count_bytes: Callable[[Candidate], int],
    ) -> None:
        self._policy = policy
        self.budget = budget
        # Who sets a budget has said how much is to be written.
        self.turnover = Turnover()
        self._is_short = is_short
        self._count_bytes = count_bytes
        self._seen = SeenObjects()
        self._held: deque[Candidate] = deque()
        self.ready: deque[Candidate] = deque()
        self._is_ending = False
        self.num_dropped = 0
        # What was not written for want of a second request, though the policy writes at once.
        self.num_unproven = 0

    def take(self, waiting: deque[Candidate]) -> None:
        """Take what was computed. Mutates ``waiting``: it is empty then."""
        is_selective = self._policy == SELECTIVE or (bool(waiting) and self._is_scarce)
        while waiting:
            candidate = waiting.popleft()
            was_seen = self._seen.add(candidate.key, self._count_bytes(candidate))
            if is_selective and not was_seen:
                self.num_unproven += self._policy != SELECTIVE
                continue
            (self._held if self._policy == WRITE_BACK else self.ready).append(candidate)
        if self._held and (self._is_ending or self._is_short()):
            self.ready.extend(self._held)
            self._held.clear()
        for queue in (self.ready, self._held):
            while len(queue) > _MAX_WAITING:
                queue.popleft()
                self.num_dropped += 1

    @property
    def _is_scarce(self) -> bool:
        return self.budget.is_scarce or (not self.budget.is_set and self.turnover.is_scarce)

    def begin(self, size: int, used: int) -> None:
        """Take note of the disk's limit, and of the bytes of what is there."""
        self.turnover.begin(size, used)
        self._seen.max_bytes = size or None

    def end(self) -> None:
        """Let everything go that is held back: the engine stops."""
        self._is_ending = True

    @property
    def has_work(self) -> bool:
        """Whether something could be written now."""
        return bool(self.ready or (self._is_ending and self._held))

    @property
    def num_waiting(self) -> int:
        """Objects that wait, held back or not."""
        return len(self.ready) + len(self._held)

    def clear(self) -> None:
        """Forget what waits."""
        self.ready.clear()
        self._held.clear()
        self._seen.clear()
