"""Updates over a bad channel: what is believed is what the replica last said, or nothing is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    NullEventPublisher,
)
from vllm.v1.engine.data_parallel.cache_changes import CacheChanges
from vllm.v1.engine.data_parallel.directory import CacheShape
from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.data_parallel.updates import UpdateFollower
from vllm.v1.engine.wire import CoreStatus

UNIT = 32
CHAIN = list(range(1, 13))


def status(number: int, epoch: int = 7, **fields) -> CoreStatus:
    return CoreStatus(0, 0, 0, epoch=epoch, number=number, **fields)


def test_late_and_doubled_messages_are_put_in_order() -> None:
    follower = UpdateFollower()
    first, second, third = (status(i) for i in range(3))
    assert follower.take(first, 0.0).changes == [first]
    assert follower.take(third, 0.1).changes == []
    assert follower.take(first, 0.1).changes == []
    assert follower.take(second, 0.2).changes == [second, third]
    assert follower.take(third, 0.2).changes == []
    assert follower.is_sure
    assert follower.num_lost == 0


def test_a_lost_message_is_asked_for_once_in_a_while_and_nothing_is_believed_meanwhile() -> None:
    follower = UpdateFollower()
    follower.take(status(0), 0.0)
    assert not follower.take(status(2), 1.0).asks
    assert follower.is_sure
    assert not follower.check(1.1)
    assert follower.check(1.3)
    assert not follower.is_sure
    assert not follower.check(1.4)
    assert follower.check(2.4)
    whole = status(4, is_cleared=True)
    assert follower.take(whole, 2.5).changes == [whole]
    assert follower.is_sure
    after = status(5)
    assert follower.take(after, 2.6).changes == [after]


def test_another_start_is_another_cache() -> None:
    follower = UpdateFollower()
    follower.take(status(0), 0.0)
    heard = follower.take(status(0, epoch=8), 0.0)
    assert heard.forgets
    assert len(heard.changes) == 1
    # Somebody who spoke before anybody listened is asked at once.
    assert UpdateFollower().take(status(3), 0.0).asks
    assert not UpdateFollower().take(status(3, is_cleared=True), 0.0).asks


class Replica:
    """A cache of one chain of prompts, with what it says on its way."""

    def __init__(self) -> None:
        self.starts = 0
        self.restart()

    def restart(self) -> None:
        self.changes = CacheChanges(NullEventPublisher(), epoch=self.starts)
        self.held: set[int] = set()
        self.starts += 1
        self.on_the_way: list[CoreStatus] = []

    def act(self, event) -> None:
        self.changes.publish(KVEventBatch(0.0, [event]))

    def speak(self) -> None:
        told = self.changes.take(len(self.held), 0, len(self.on_the_way))
        if told is not None:
            self.on_the_way.append(told)


class BadChannel(RuleBasedStateMachine):
    """Two replicas, whose messages are lost, doubled, swapped and late, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RouterSettings(CacheShape(UNIT, (UNIT,)), 2, 16, 100, 32.0))
        self.replicas = [Replica(), Replica()]
        self.now = 0.0
        self.asks: set[int] = set()

    ranks = st.integers(0, 1)

    def ask(self, rank: int) -> None:
        self.replicas[rank].changes.tell_all()
        self.replicas[rank].speak()

    def deliver(self, rank: int, message: CoreStatus) -> None:
        if self.router.observe(rank, message, self.now):
            self.asks.add(rank)

    @rule(rank=ranks, length=st.integers(1, len(CHAIN)))
    def store(self, rank: int, length: int) -> None:
        replica = self.replicas[rank]
        for i in range(length):
            if CHAIN[i] not in replica.held:
                parent = CHAIN[i - 1] if i else None
                replica.act(
                    BlockStored([CHAIN[i]], parent, [], UNIT, None, None, None, group_idx=0)
                )
                replica.held.add(CHAIN[i])
        replica.speak()

    @rule(rank=ranks, place=st.integers(0, len(CHAIN) - 1))
    def evict(self, rank: int, place: int) -> None:
        replica = self.replicas[rank]
        if CHAIN[place] in replica.held:
            replica.held.discard(CHAIN[place])
            replica.act(BlockRemoved([CHAIN[place]], None, group_idx=0))
        replica.speak()

    @rule(rank=ranks)
    def reset(self, rank: int) -> None:
        self.replicas[rank].held.clear()
        self.replicas[rank].act(AllBlocksCleared())
        self.replicas[rank].speak()

    @rule(rank=ranks)
    def restart(self, rank: int) -> None:
        self.replicas[rank].restart()
        self.replicas[rank].speak()

    @rule(rank=ranks, place=st.integers(0, 5), fate=st.sampled_from(["take", "lose", "double"]))
    def channel(self, rank: int, place: int, fate: str) -> None:
        waiting = self.replicas[rank].on_the_way
        if place >= len(waiting):
            return
        message = waiting[place] if fate == "double" else waiting.pop(place)
        if fate != "lose":
            self.deliver(rank, message)

    @rule()
    def time_passes(self) -> None:
        self.now += 0.3
        self.asks |= set(self.router.check_updates(self.now))

    @precondition(lambda self: self.asks)
    @rule()
    def answer(self) -> None:
        for rank in sorted(self.asks):
            self.ask(rank)
        self.asks.clear()

    @rule()
    def settle(self) -> None:
        """A quiet channel for a while: everything that is believed is true, and all is known."""
        for _ in range(12):
            for rank, replica in enumerate(self.replicas):
                replica.act(BlockRemoved([10**6], None, group_idx=0))
                replica.changes.take(0, 0, -1)  # lost
                replica.speak()
                while replica.on_the_way:
                    self.deliver(rank, replica.on_the_way.pop(0))
            self.time_passes()
            for rank in sorted(self.asks):
                self.ask(rank)
            self.asks.clear()
        for rank, replica in enumerate(self.replicas):
            while replica.on_the_way:
                self.deliver(rank, replica.on_the_way.pop(0))
            expected = next((i for i, h in enumerate(CHAIN) if h not in replica.held), len(CHAIN))
            assert self.predict(rank) == expected * UNIT

    def predict(self, rank: int) -> int:
        self.router.route_prompt("probe", CHAIN, len(CHAIN) * UNIT + 1, rank)
        predicted = self.router.foretold("probe")
        self.router.end("probe")
        return predicted

    @invariant()
    def a_prediction_can_always_be_made(self) -> None:
        for rank in range(2):
            assert 0 <= self.predict(rank) <= len(CHAIN) * UNIT


BadChannel.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestBadChannel = pytest.mark.slow(BadChannel.TestCase)
