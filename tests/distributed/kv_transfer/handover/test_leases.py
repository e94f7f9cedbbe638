"""Leases end once, and their blocks go when nobody reads them any more."""

import threading

from vllm.distributed.kv_transfer.handover.leases import LeaseTable
from vllm.v1.core.pool.exports import PrefixBlocks

BLOCKS = PrefixBlocks(32, 0, (0,), ((1,),))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_expires() -> None:
    clock = Clock()
    table = LeaseTable(clock)
    table.offer("a", BLOCKS, 10.0)
    table.offer("b", BLOCKS, 20.0)
    assert table.collect() == set()
    clock.now = 10.0
    assert table.collect() == {"a"}
    assert table.is_gone("a")
    assert table.begin_reading("a") is None
    assert len(table) == 1


def test_a_lease_that_is_read_is_collected_afterwards() -> None:
    clock = Clock()
    table = LeaseTable(clock)
    table.offer("a", BLOCKS, 10.0)
    first, second = table.begin_reading("a"), table.begin_reading("a")
    assert first is second is not None
    clock.now = 99.0
    assert table.collect() == set()
    # The reader sees it before its next row.
    assert first.has_ended
    assert table.begin_reading("a") is None
    table.end_reading(first)
    assert table.collect() == set()
    table.end_reading(first)
    assert table.collect() == {"a"}
    assert table.collect() == set()


def test_a_released_lease_is_not_the_same_as_an_unknown_one() -> None:
    table = LeaseTable(Clock())
    assert not table.is_gone("b")
    table.offer("b", BLOCKS, 10.0)
    table.end("b")
    table.end("b")
    assert table.is_gone("b")
    assert table.collect() == {"b"}


def test_a_release_may_overtake_the_offer() -> None:
    # The other engine had all of it already, and said so before this one's next step.
    table = LeaseTable(Clock())
    table.end("a")
    assert not table.is_gone("a")
    table.offer("a", BLOCKS, 10.0)
    assert table.begin_reading("a") is None
    assert table.collect() == {"a"}
    assert table.is_gone("a")
    # A lease that has ended and is released again leaves nothing behind.
    table.end("a")
    table.offer("b", BLOCKS, 10.0)
    assert table.begin_reading("b") is not None


def test_reading_may_end_while_the_table_is_busy() -> None:
    # As when an answer that was cut short is collected as garbage by the thread that collects.
    readers = []

    def clock() -> float:
        while readers:
            table.end_reading(readers.pop())
        return 99.0

    table = LeaseTable(lambda: 0.0)
    table.offer("a", BLOCKS, 10.0)
    readers.append(table.begin_reading("a"))
    table._clock = clock
    thread = threading.Thread(target=table.collect, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    assert table.is_gone("a")


def test_an_engine_that_goes_ends_all() -> None:
    table = LeaseTable(Clock())
    for name in "abc":
        table.offer(name, BLOCKS, 10.0)
    table.end_all()
    assert table.collect() == set("abc")
