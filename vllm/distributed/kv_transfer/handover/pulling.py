"""The decoding engine's side: what it says, what it believes, when it gives up. No socket.

    not connected --> greeting --> talking --> outcome
         ^---- broken: closed, garbled, quiet ----'

A driver connects when ``retry_at`` says so, sends what it is given, and hands in what comes. Time
is an argument everywhere, so that every way in which a peer can fail is played in tests.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.handover.direct import RowSink
from vllm.distributed.kv_transfer.handover.frames import (
    Buffer,
    FrameError,
    Head,
    Kind,
    check_control,
    control_frame,
    digest_payload,
    rows_key,
)
from vllm.distributed.kv_transfer.handover.manifest import find_mismatch
from vllm.distributed.kv_transfer.handover.messages import (
    Hello,
    Pull,
    Refuse,
    Release,
    decode,
    encode,
    to_ranges,
)
from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.handover.regions import Region
from vllm.distributed.kv_transfer.handover.serving import Frame, RowMemory, find_block
from vllm.v1.core.pool.exports import PrefixBlocks

_FIRST_RETRY_S = 0.02
_LONGEST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PullTimeouts:
    """How long the decoding engine waits.

    Attributes:
        quiet_s: For the next frame on a connection, before it is given up for another.
        stuck_s: Without any progress, over all connections.
    """

    quiet_s: float = 5.0
    stuck_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a conversation ended.

    Attributes:
        succeeded: Whether all came, and was verified.
        reason: If not, why not.
    """

    succeeded: bool
    reason: str = ""


class Conversation(ABC):
    """What a load and a release have in common: greeting, retries, deadline.

    Owns: its outcome, and where it stands.

    Args:
        me: This engine.
        remote: The prefix, and who holds it.
        deadline: When it has failed, by the driver's clock.
        now: The same clock, now.
        timeouts: How long it waits.
    """

    def __init__(
        self, me: Hello, remote: RemotePrefix, deadline: float, now: float, timeouts: PullTimeouts
    ) -> None:
        self._me = me
        self.remote = remote
        self._deadline = deadline
        self._timeouts = timeouts
        self._progressed_at = now
        self._num_breaks = 0
        self._is_greeted = self._has_met = False
        self.outcome: Outcome | None = None
        # When to connect next.
        self.retry_at = now
        self._lock = threading.Lock()
        self._is_talking = False

    def begin_talking(self) -> bool:
        """Take note that a driver has a connection; False: the conversation has ended meanwhile.

        Until ``end_talking`` rows may be written.
        """
        with self._lock:
            self._is_talking = self.outcome is None
            return self._is_talking

    def end_talking(self) -> None:
        """The other half of ``begin_talking``."""
        with self._lock:
            self._is_talking = False

    def has_ended(self, now: float) -> bool:
        """Whether it has an outcome and writes no more; any thread may ask.

        A driver may wait for a name server, or for another conversation, longer than there is time:
        the deadline holds for those too.
        """
        with self._lock:
            if self._is_talking:
                return False
            self.check_deadline(now)
            return self.outcome is not None

    def connected(self, *, is_greeted: bool) -> Sequence[Frame]:
        """Begin on a connection; ``is_greeted`` says that it was used before."""
        self._is_greeted = is_greeted
        if is_greeted:
            return self._begin()
        return [control_frame(Kind.HELLO, encode(self._me))]

    def target(self, head: Head) -> list[memoryview] | None:
        """Return where a frame's payload is to be received; None: anywhere else."""
        del head
        return None

    @staticmethod
    def wants_payload(head: Head) -> bool:
        """Whether a payload without a target is handed in; rows that nobody wants are not."""
        return head.kind is not Kind.ROWS

    def receive(self, head: Head, payload: Buffer | None, now: float) -> Sequence[Frame]:
        """Take a frame; returns what to send.

        Args:
            head: Its head.
            payload: Its payload; None: it is where ``target`` said.
            now: The clock.

        Raises:
            FrameError: The connection is of no further use.
        """
        if head.kind is Kind.ROWS:
            return self._take_rows(head, payload, now)
        if head.kind is Kind.WRITTEN:
            # Its digest is that of the rows, which are elsewhere.
            return self._take_answer(head, b"", now) if self._is_greeted else ()
        data = check_control(head, b"" if payload is None else payload)
        if head.kind is Kind.REFUSE:
            self.fail(decode(data, Refuse).reason)
        elif head.kind is Kind.WELCOME and not self._is_greeted:
            return self._take_welcome(decode(data, Hello), now)
        elif self._is_greeted:
            return self._take_answer(head, data, now)
        return ()

    def _take_welcome(self, other: Hello, now: float) -> Sequence[Frame]:
        mismatch = find_mismatch(self._me, other)
        if mismatch is not None:
            self.fail(mismatch)
        elif other.instance != self.remote.instance:
            self.fail(f"engine {self.remote.engine_id} was started anew since it answered")
        else:
            self._is_greeted = True
            if not self._has_met:
                # Once: a holder that greets and has nothing is no progress.
                self._has_met, self._progressed_at = True, now
            return self._begin()
        return ()

    def broken(self, reason: str, now: float) -> None:
        """Take note that the connection is gone, or was never made."""
        self._is_greeted = False
        self._num_breaks += 1
        pause = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** min(self._num_breaks, 10))
        self.retry_at = now + pause
        if now - self._progressed_at >= self._timeouts.stuck_s:
            self.fail(reason)
        self.check_deadline(now)

    def check_deadline(self, now: float) -> None:
        """Fail if the deadline has come."""
        if now >= self._deadline:
            self.fail("the deadline passed before all rows came")

    def fail(self, reason: str) -> None:
        """End without success, unless it has ended."""
        if self.outcome is None:
            where = f"{self.remote.host}:{self.remote.port}"
            self.outcome = Outcome(False, f"{where}: {reason}")

    def wait_s(self, last: float, now: float) -> float:
        """Return how long to wait before the connection is broken; something came at ``last``."""
        return min(last + self._timeouts.quiet_s, self._deadline) - now

    @abstractmethod
    def _begin(self) -> Sequence[Frame]:
        """Return what is said first to one who was greeted."""

    def _take_rows(self, head: Head, payload: Buffer | None, now: float) -> Sequence[Frame]:
        """Take rows; a conversation that asked for none drops them."""
        return ()

    @abstractmethod
    def _take_answer(self, head: Head, data: bytes, now: float) -> Sequence[Frame]:
        """Take a control frame of the other side's."""


class Load(Conversation):
    """Loads a prefix.

    Owns: which regions are still missing.

    Args:
        me: This engine.
        remote: The prefix, and who holds it.
        blocks: Where its rows go.
        regions: What to ask for; see ``list_regions``.
        memory: Where the rows go.
        make_generation: Returns a number that no pull had before.
        deadline: When it has failed.
        now: The same clock, now.
        timeouts: How long it waits.
        sink: Where the holder writes the rows, if they do not come on the connection.
    """

    def __init__(
        self,
        me: Hello,
        remote: RemotePrefix,
        blocks: PrefixBlocks,
        regions: Sequence[Region],
        memory: RowMemory,
        make_generation: Callable[[], int],
        deadline: float,
        now: float,
        timeouts: PullTimeouts,
        sink: RowSink | None = None,
    ) -> None:
        super().__init__(me, remote, deadline, now, timeouts)
        self._sink = sink
        # Of the regions that this pull asked for: where in the sink, and how many bytes.
        self._places: dict[int, tuple[int, int]] = {}
        self._blocks = blocks
        self._regions = regions
        self._memory = memory
        self._make_generation = make_generation
        self._missing = set(range(len(regions)))
        self._generation = 0
        # (head, buffers) of the frame that is being received.
        self._incoming: tuple[Head, list[memoryview]] | None = None
        # Rows that came and were not asked for, or not believed.
        self.num_dropped = 0
        if not regions:
            self.outcome = Outcome(True)

    def _begin(self) -> Sequence[Frame]:
        self._generation = self._make_generation()
        sink = self._sink
        wanted = sorted(self._missing)
        if sink is not None:
            self._places = self._place(wanted, sink.capacity)
            wanted = list(self._places)
        pull = Pull(
            self.remote.lease,
            self._blocks.num_tokens,
            self._blocks.dense_from,
            len(self._regions),
            to_ranges(wanted),
            "" if sink is None else sink.session,
            0 if sink is None else sink.address,
        )
        return [control_frame(Kind.PULL, encode(pull), self._generation)]

    def _place(self, wanted: Sequence[int], capacity: int) -> dict[int, tuple[int, int]]:
        """Return where in the sink the first of some regions go, one behind the other."""
        places: dict[int, tuple[int, int]] = {}
        offset = 0
        for index in wanted:
            length = sum(piece.nbytes for piece in self._target_of(index))
            if offset + length > capacity:
                if not places:
                    self.fail(f"a region of {length} bytes is above the buffer's {capacity}")
                break
            places[index] = offset, length
            offset += length
        return places

    def _target_of(self, index: int) -> list[memoryview]:
        region = self._regions[index]
        return self._memory.target(region, self._block_id(region))

    def target(self, head: Head) -> list[memoryview] | None:
        """Return where rows go that this very pull asked for and that have not come yet."""
        self._incoming = None
        is_asked_for = (
            self.outcome is None
            and self._is_greeted
            and head.kind is Kind.ROWS
            and head.generation == self._generation
            and head.index in self._missing
        )
        if not is_asked_for:
            return None
        buffers = self._target_of(head.index)
        if sum(buffer.nbytes for buffer in buffers) != head.length:
            return None
        self._incoming = head, buffers
        return buffers

    def _take_rows(self, head: Head, payload: Buffer | None, now: float) -> Sequence[Frame]:
        incoming, self._incoming = self._incoming, None
        if payload is not None or incoming is None or incoming[0] != head:
            self.num_dropped += 1
            return ()
        buffers = incoming[1]
        key = rows_key(self.remote.lease, head.generation, head.index)
        if digest_payload(key, buffers) != head.digest:
            # What was written there is not used: the region is still missing.
            self.num_dropped += 1
            return ()
        self._accept(head, buffers, now)
        return ()

    def _take_written(self, head: Head, now: float) -> None:
        """Take rows that the holder says it has written into the sink."""
        place = self._places.get(head.index)
        if self._sink is None or place is None or head.index not in self._missing:
            self.num_dropped += 1
            return
        # A copy is checked, and not what may be written once more meanwhile.
        data = memoryview(self._sink.read(*place))
        key = rows_key(self.remote.lease, head.generation, head.index)
        if digest_payload(key, (data,)) != head.digest:
            self.num_dropped += 1
            return
        buffers = self._target_of(head.index)
        for buffer in buffers:
            buffer[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]
        self._accept(head, buffers, now)

    def _accept(self, head: Head, buffers: list[memoryview], now: float) -> None:
        region = self._regions[head.index]
        self._memory.commit(region, self._block_id(region), buffers)
        self._missing.discard(head.index)
        self._progressed_at = now
        self._num_breaks = 0
        if not self._missing and self.outcome is None:
            self.outcome = Outcome(True)

    def _take_answer(self, head: Head, data: bytes, now: float) -> Sequence[Frame]:
        if head.generation != self._generation:
            return ()
        if head.kind is Kind.WRITTEN:
            self._take_written(head, now)
        elif head.kind is Kind.FAIL:
            refusal = decode(data, Refuse)
            if refusal.is_final:
                self.fail(refusal.reason)
                return ()
            raise FrameError(refusal.reason)
        elif head.kind is Kind.END and self._missing:
            if now - self._progressed_at >= self._timeouts.stuck_s:
                raise FrameError(f"{len(self._missing)} regions do not come whole")
            return self._begin()
        return ()

    def _block_id(self, region: Region) -> int:
        return find_block(self._blocks.bases, self._blocks.block_ids, region)


class Returning(Conversation):
    """Tells the holder of a prefix that it is needed no more."""

    def _begin(self) -> Sequence[Frame]:
        return [control_frame(Kind.RELEASE, encode(Release(self.remote.lease)))]

    def _take_answer(self, head: Head, data: bytes, now: float) -> Sequence[Frame]:
        if head.kind is Kind.RELEASED and decode(data, Release).lease == self.remote.lease:
            self.outcome = Outcome(True)
        return ()
