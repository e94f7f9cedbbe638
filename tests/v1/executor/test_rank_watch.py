"""Which silence means death, by a clock of the test's own."""

from vllm.v1.executor.messages import Beat
from vllm.v1.executor.rank_watch import RankWatch


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rank_without_signs_of_life_is_named() -> None:
    clock = Clock()
    watch = RankWatch(range(2), 10.0, clock)
    for second in range(12):
        clock.now = second
        watch.saw_beat(0, Beat(effort_s=second))
    assert watch.find_fault() == "rank 1 gave no sign of life for 10 s"


def test_ranks_that_wait_for_one_that_computes_live() -> None:
    clock = Clock()
    watch = RankWatch(range(2), 10.0, clock)
    for second in range(60):
        clock.now = second
        watch.saw_beat(0, Beat(effort_s=second))
        watch.saw_beat(1, Beat(effort_s=0.5))
        assert watch.find_fault() is None


def test_ranks_that_all_wait_hang() -> None:
    clock = Clock()
    watch = RankWatch(range(3), 10.0, clock)
    watch.saw_answer(1)
    for second in range(12):
        clock.now = second
        for rank in (0, 2):
            watch.saw_beat(rank, Beat(effort_s=3.0))
    fault = watch.find_fault()
    assert fault == "no rank computed for 10 s, while 0, 2 owed an answer"


def test_a_rank_that_answered_owes_nothing() -> None:
    clock = Clock()
    watch = RankWatch(range(2), 10.0, clock)
    for rank in range(2):
        watch.saw_answer(rank)
    clock.now = 100.0
    assert watch.find_fault() is None
