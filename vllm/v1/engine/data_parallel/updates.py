"""What a replica says, in order: late, doubled and lost messages between a replica and a router."""

from dataclasses import dataclass, field

from vllm.v1.engine.wire import CoreStatus

# Messages that wait for one that is late; then everything is asked for.
_MAX_WAITING = 64
# After so long nobody waits for a late message any more.
_PATIENCE_S = 0.25
# Everything is asked for again when it did not come.
_ASK_AGAIN_S = 1.0


@dataclass(slots=True)
class Heard:
    """What a message came to.

    Attributes:
        changes: To take in, in order.
        forgets: Whether what the replica cached is forgotten first: another start of it speaks.
        asks: Whether to ask the replica for everything, now.
    """

    changes: list[CoreStatus] = field(default_factory=list)
    forgets: bool = False
    asks: bool = False


class UpdateFollower:
    """Puts the messages of one replica in order.

    A message that is late is waited for a moment, a doubled one passed over; where one is lost,
    everything is asked for, and until it comes nothing is believed (``is_sure``).

    Owns: which number comes next, and the messages that wait for it.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._next = 0
        self._waiting: dict[int, CoreStatus] = {}
        self._gap_since: float | None = None
        self._asked_at: float | None = None
        self.num_lost = 0

    @property
    def is_sure(self) -> bool:
        """Whether what is known of the replica's cache is what it said, with nothing left out."""
        return self._asked_at is None

    def take(self, message: CoreStatus, now: float) -> Heard:
        """Take a message in; returns what to do."""
        heard = Heard()
        if message.epoch != self._epoch:
            heard.forgets = self._epoch is not None
            self._epoch, self._next = message.epoch, 0
            self._waiting.clear()
            self._gap_since = self._asked_at = None
            if message.number:
                # It has spoken before anybody listened.
                self._asked_at, heard.asks = now, not message.is_cleared
        if message.number < self._next:
            return heard
        if message.is_cleared:
            # Whatever was missed before it does not matter.
            self._waiting = {n: m for n, m in self._waiting.items() if n > message.number}
            self._next = message.number
            self._asked_at = None
        self._waiting[message.number] = message
        self._drain(heard)
        if heard.changes:
            # What was late came after all.
            self._asked_at = None
        self._look_for_gap(heard, now)
        return heard

    def check(self, now: float) -> bool:
        """Return whether everything is to be asked for now: a message is late for too long."""
        heard = Heard()
        self._look_for_gap(heard, now)
        return heard.asks

    def _drain(self, heard: Heard) -> None:
        while (message := self._waiting.pop(self._next, None)) is not None:
            heard.changes.append(message)
            self._next += 1

    def _look_for_gap(self, heard: Heard, now: float) -> None:
        if self._asked_at is not None:
            if now - self._asked_at >= _ASK_AGAIN_S:
                self._asked_at, heard.asks = now, True
        elif not self._waiting:
            self._gap_since = None
        else:
            self._gap_since = now if self._gap_since is None else self._gap_since
            is_long = now - self._gap_since >= _PATIENCE_S
            if is_long or len(self._waiting) > _MAX_WAITING:
                self.num_lost += 1
                self._asked_at, heard.asks = now, True
                self._gap_since = None
        if self._asked_at is not None and len(self._waiting) > _MAX_WAITING:
            # Everything will come with a number above theirs.
            self._waiting.clear()
