"""Prefixes handed over on a wire that fails: does a wrong row ever pass, a request ever hang?

    python -m benchmarks.transfer_faults [--faults 10000] [--seed 0]

Two engines' transfer machines, without sockets and without a model, on a clock of their own. Each
trial hands a few prefixes over while faults are injected: frames dropped, doubled, swapped, changed
in a bit, delayed, cut short; connections closed on one or on both sides; the holder killed, started
anew, or started anew as another model; leases that expire or are withdrawn; requests that end while
they load. Then it is checked that

* a load that succeeded has exactly the rows of its prompt, whatever else the blocks held before;
* every conversation ended by its deadline;
* every block on both sides is free again.

Prints one JSON line; the first violation raises.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.result import print_result
from benchmarks.transfer_engines import (
    GROUPS,
    LEASE_S,
    MANIFEST,
    NUM_BLOCKS,
    UNIT,
    BytePool,
    Clock,
    Peer,
    rows_of,
)
from vllm.distributed.kv_transfer.handover.frames import HEAD_BYTES, FrameError, Head
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.handover.pulling import (
    Conversation,
    Load,
    PullTimeouts,
    Returning,
)
from vllm.distributed.kv_transfer.handover.regions import list_regions
from vllm.distributed.kv_transfer.handover.serving import Frame, Serving, find_block
from vllm.v1.core.pool.exports import PrefixBlocks

FRAME_FAULTS = ("drop", "double", "swap", "head", "payload", "delay", "cut")
EVENTS = ("close", "half-close", "kill", "restart", "mismatch", "expire", "withdraw", "cancel")
_HOP_S = 0.001
_DEADLINE_S = 20.0


class Violation(AssertionError):
    """What must never happen did."""


class Wire:
    """One connection: frames on their way, and what becomes of them."""

    def __init__(self, trial: "Trial") -> None:
        self.trial = trial
        self.is_open = True
        self.is_mute = False
        self.last_arrival = 0.0
        peer = trial.peer
        self._serving = Serving(peer.me, GROUPS, peer.leases, peer.pool)
        self._answers: Iterator[Frame] = iter(())
        self._inbox: list[tuple[bytes, bytes]] = []
        self._is_busy = False

    def send(self, frame: Frame) -> None:
        """Puller to holder."""
        for delay, head, payload, is_cut in self.trial.spoil(frame):
            if not is_cut:
                self.trial.clock.after(delay, lambda h=head, p=payload: self._ask(h, p))

    def _ask(self, head: bytes, payload: bytes) -> None:
        self._inbox.append((head, payload))
        if not self._is_busy:
            self._work()

    def _work(self) -> None:
        """Do one thing of the holder's thread: send a frame, or take the next one."""
        self._is_busy = False
        if not self.is_open or not self.trial.peer.is_up:
            self._stop()
            return
        try:
            frame = next(self._answers, None)
            if frame is None:
                if not self._inbox:
                    return
                head_bytes, payload = self._inbox.pop(0)
                self._answers = self._serving.handle(Head.unpack(head_bytes), payload)
            elif not self.is_mute:
                for delay, head, data, is_cut in self.trial.spoil(frame):
                    arrive = lambda h=head, p=data, c=is_cut: self.trial.arrive(self, h, p, c)  # noqa: E731
                    self.trial.clock.after(delay, arrive)
        except FrameError:
            self.close()
            return
        self._is_busy = True
        self.trial.clock.after(_HOP_S, self._work)

    def _stop(self) -> None:
        close = getattr(self._answers, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """End it; both sides hear of it."""
        if self.is_open:
            self.is_open = False
            self._stop()
            self.trial.clock.after(_HOP_S, lambda: self.trial.lost(self, "closed"))


class Trial:
    """A few prefixes handed over, with faults.

    Args:
        seed: Of everything.
        num_faults: Faults to inject.
        load_class: What loads; tests put a credulous one here, to see that it is caught.
    """

    def __init__(self, seed: int, num_faults: int, load_class: type[Load] = Load) -> None:
        self._load_class = load_class
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.peer = Peer(
            self.clock, BytePool(self.rng), Hello(dict(MANIFEST), "holder", f"run-{seed}")
        )
        self.pool = BytePool(self.rng)
        self.me = Hello(dict(MANIFEST), "puller", f"puller-{seed}")
        self.injected: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.num_dropped = 0
        self._frame_faults = [
            self.rng.choice(FRAME_FAULTS) for _ in range(num_faults) if self.rng.random() < 0.7
        ]
        self._events = [
            self.rng.choice(EVENTS) for _ in range(num_faults - len(self._frame_faults))
        ]
        self._wire: Wire | None = None
        self._current: Conversation | None = None
        self._is_settling = False
        self._queue: list[Conversation] = []
        self._deadlines: dict[int, float] = {}
        self._generation = self.rng.getrandbits(62)
        self._swapped: tuple[bytes, bytes] | None = None

    # ---- faults ------------------------------------------------------------------------------

    def spoil(self, frame: Frame) -> list[tuple[float, bytes, bytes, bool]]:
        """Return what becomes of a frame: (delay, head, payload, whether the rest is cut off)."""
        head, payload = bytes(frame[0]), b"".join(bytes(piece) for piece in frame[1:])
        usual = [(_HOP_S, head, payload, False)]
        if self._swapped is not None:
            held, self._swapped = self._swapped, None
            usual.append((2 * _HOP_S, *held, False))
        if not self._frame_faults or self.rng.random() > 0.15:
            return usual
        fault = self._frame_faults.pop()
        self.injected[fault] += 1
        if fault == "drop":
            return usual[1:]
        if fault == "double":
            return [*usual, (self.rng.choice((_HOP_S, 0.05, 3.0)), head, payload, False)]
        if fault == "swap":
            self._swapped = head, payload
            return usual[1:]
        if fault == "delay":
            return [(self.rng.choice((0.05, 1.0, 8.0)), head, payload, False), *usual[1:]]
        if fault == "cut":
            return [(_HOP_S, head, payload[: len(payload) // 2], True), *usual[1:]]
        data = bytearray(head if fault == "head" or not payload else payload)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        if fault == "head" or not payload:
            return [(_HOP_S, bytes(data), payload, False), *usual[1:]]
        return [(_HOP_S, head, bytes(data), False), *usual[1:]]

    def _strike(self) -> None:
        """Let the next event happen."""
        if not self._events:
            return
        event = self._events.pop()
        self.injected[event] += 1
        peer, wire = self.peer, self._wire
        if event == "close" and wire is not None:
            wire.close()
        elif event == "half-close" and wire is not None:
            wire.is_mute = True
        elif event in ("kill", "restart", "mismatch") and peer.is_up:
            peer.die()
            if wire is not None:
                wire.close()
            if event != "kill":
                other = MANIFEST if event == "restart" else {**MANIFEST, "block_size": "32"}
                self.clock.after(0.5, lambda: peer.start_again(dict(other)))
        elif event in ("expire", "withdraw"):
            for lease in list(peer.held):
                peer.leases.end(lease)
        elif event == "cancel" and self._current is not None:
            self._current.fail("the request ended")
        self.clock.after(self.rng.choice((0.002, 0.01, 1.0)), self._strike)

    # ---- the puller's thread -----------------------------------------------------------------

    def begin(self, conversation: Conversation) -> None:
        """Queue a conversation."""
        self._queue.append(conversation)
        self._deadlines[id(conversation)] = self.clock.now + _DEADLINE_S
        if self._current is None and not self._is_settling:
            self._next()

    def _next(self) -> None:
        self._current = self._queue.pop(0) if self._queue else None
        if self._current is not None:
            self._turn(is_reused=self._wire is not None)

    def _turn(self, is_reused: bool = False) -> None:
        """Go on with the current conversation: end it, connect, or say what is to be said."""
        conversation, now = self._current, self.clock.now
        if conversation is None or self._settle():
            return
        if self._wire is None and conversation.retry_at > now:
            conversation.check_deadline(now)
            self.clock.after(min(conversation.retry_at - now, 0.25), self._turn)
            return
        if self._wire is None:
            if not self.peer.is_up:
                conversation.broken("refused", now)
                self.clock.after(_HOP_S, self._turn)
                return
            self._wire, is_reused = Wire(self), False
        self._wire.last_arrival = now
        for frame in conversation.connected(is_greeted=is_reused):
            self._wire.send(frame)
        self._watch(self._wire, conversation)

    def _watch(self, wire: Wire, conversation: Conversation) -> None:
        """Notice a connection on which nothing comes."""
        if wire is not self._wire or conversation is not self._current or self._settle():
            return
        left = conversation.wait_s(wire.last_arrival, self.clock.now)
        if left <= 0:
            wire.close()
            return
        self.clock.after(min(left, 0.25), lambda: self._watch(wire, conversation))

    def lost(self, wire: Wire, reason: str) -> None:
        """The connection is gone."""
        if wire is not self._wire:
            return
        self._wire = None
        if self._current is not None:
            self._current.broken(reason, self.clock.now)
            self._turn()

    def arrive(self, wire: Wire, head_bytes: bytes, payload: bytes, is_cut: bool) -> None:
        """A frame comes."""
        conversation = self._current
        if wire is not self._wire or not wire.is_open or conversation is None:
            return
        wire.last_arrival = self.clock.now
        try:
            head = Head.unpack(head_bytes)
            target = conversation.target(head)
            if target is not None:
                data = memoryview(payload)
                for piece in target:
                    part = data[: len(piece)]
                    piece[: len(part)] = part
                    data = data[len(part) :]
            if is_cut:
                wire.close()
                return
            if target is not None:
                answers = conversation.receive(head, None, self.clock.now)
            else:
                kept = payload if conversation.wants_payload(head) else b""
                answers = conversation.receive(head, kept, self.clock.now)
        except FrameError:
            wire.close()
            return
        for frame in answers:
            wire.send(frame)
        self._settle()

    def _settle(self) -> bool:
        """Take the outcome of the current conversation, if it has one, and go on to the next."""
        conversation = self._current
        if conversation is None or conversation.outcome is None:
            return conversation is None
        if self.clock.now > self._deadlines[id(conversation)] + 0.5:
            raise Violation(f"a conversation ended {self.clock.now} s after its deadline")
        if not conversation.outcome.succeeded and self._wire is not None:
            wire, self._wire = self._wire, None
            wire.close()
        self._current, self._is_settling = None, True
        self._ended(conversation)
        self._is_settling = False
        self._next()
        return True

    # ---- the engines -------------------------------------------------------------------------

    def run(self) -> None:
        """Hand over, strike, and check.

        Raises:
            Violation: A row was wrong, a request hung, or a block is lost.
        """
        self._loads: dict[int, tuple[int, PrefixBlocks, RemotePrefix]] = {}
        for number in range(self.rng.randint(1, 3)):
            self._hand_over(number)
        self.clock.after(self.rng.choice((0.0, 0.002, 0.005, 0.02)), self._strike)
        steps = int((LEASE_S + 2 * _DEADLINE_S) / 0.05)
        for _ in range(steps):
            self.clock.run(self.clock.now + 0.05)
            self.peer.step()
            if self._current is None and not self._queue and not self.peer.held:
                break
        if self._current is not None or self._queue:
            raise Violation("a conversation never ended")
        self.clock.run(self.clock.now + LEASE_S)
        self.peer.step()
        for name, pool in (("holder", self.peer.pool), ("puller", self.pool)):
            if len(pool.free) != NUM_BLOCKS:
                raise Violation(f"the {name} lost {NUM_BLOCKS - len(pool.free)} blocks")

    def _hand_over(self, number: int) -> None:
        prompt = self.rng.getrandbits(40)
        num_tokens = UNIT * self.rng.randint(1, 16)
        dense_from = UNIT * self.rng.randint(0, num_tokens // UNIT)
        lease = f"lease-{number}"
        self.peer.offer(lease, prompt, num_tokens)
        instance = self.peer.me.instance
        remote = RemotePrefix("holder", instance, "h", 1, lease, num_tokens, "digest")
        blocks = self.pool.take(num_tokens, dense_from)
        regions = list_regions(GROUPS, num_tokens, dense_from)
        now = self.clock.now
        load = self._load_class(
            *(self.me, remote, blocks, regions, self.pool, self._next_generation),
            *(now + _DEADLINE_S, now, PullTimeouts()),
        )
        self._loads[id(load)] = prompt, blocks, remote
        self.begin(load)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _ended(self, conversation: Conversation) -> None:
        entry = self._loads.pop(id(conversation), None)
        assert conversation.outcome is not None
        if entry is None:
            self.outcomes["returned" if conversation.outcome.succeeded else "not returned"] += 1
            return
        assert isinstance(conversation, Load)
        self.num_dropped += conversation.num_dropped
        prompt, blocks, remote = entry
        if conversation.outcome.succeeded:
            self._check_rows(prompt, blocks)
        self.outcomes["loaded" if conversation.outcome.succeeded else "recomputed"] += 1
        self.pool.give_back(blocks)
        now = self.clock.now
        self.begin(Returning(self.me, remote, now + _DEADLINE_S, now, PullTimeouts()))

    def _check_rows(self, prompt: int, blocks: PrefixBlocks) -> None:
        for region in list_regions(GROUPS, blocks.num_tokens, blocks.dense_from):
            block_id = find_block(blocks.bases, blocks.block_ids, region)
            found = b"".join(bytes(piece) for piece in self.pool.target(region, block_id))
            if found != rows_of(prompt, region):
                raise Violation(f"rows of {region} are not those of the prompt")


@dataclass
class FaultReport:
    """What was done, and what came of it."""

    num_trials: int = 0
    num_faults: int = 0
    num_dropped_frames: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


def inject(num_faults: int, seed: int, load_class: type[Load] = Load) -> FaultReport:
    """Run trials until so many faults were injected.

    Raises:
        Violation: The first thing that must never happen.
    """
    report = FaultReport()
    while report.num_faults < num_faults:
        trial_seed = seed * 1_000_003 + report.num_trials
        trial = Trial(trial_seed, 1 + report.num_trials % 6, load_class)
        try:
            trial.run()
        except Violation as violation:
            raise Violation(f"trial {trial_seed}: {violation}") from violation
        report.num_trials += 1
        report.num_faults += trial.injected.total()
        report.num_dropped_frames += trial.num_dropped
        report.injected += trial.injected
        report.outcomes += trial.outcomes
    return report


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = inject(args.faults, args.seed)
    values = {
        "trials": report.num_trials,
        "faults": report.num_faults,
        "injected": dict(sorted(report.injected.items())),
        "outcomes": dict(sorted(report.outcomes.items())),
        "rows_not_believed": report.num_dropped_frames,
        "head_bytes": HEAD_BYTES,
    }
    print_result("transfer_faults", vars(args), values)


if __name__ == "__main__":
    main()
