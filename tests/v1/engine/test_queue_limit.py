import pytest

from vllm.exceptions import QueueFullError
from vllm.v1.engine.queue_limit import QueueLimit
from vllm.v1.metrics.stats import SchedulerStats


def test_without_a_limit_all_are_let_in():
    QueueLimit(None, 1).admit(100, 10_000)


def test_only_what_cannot_run_counts():
    limit = QueueLimit(2, 4)
    limit.admit(1, 5)
    with pytest.raises(QueueFullError, match="3 requests would wait, at most 2"):
        limit.admit(1, 6)
    limit.admit(6, 0)
    with pytest.raises(QueueFullError):
        limit.admit(7, 0)


def test_nobody_waits_with_a_limit_of_zero():
    limit = QueueLimit(0, 1)
    limit.admit(1, 0)
    with pytest.raises(QueueFullError):
        limit.admit(1, 1)


def test_requests_that_wait_for_memory_count():
    limit = QueueLimit(3, 100)
    limit.observe(SchedulerStats(num_running_reqs=2, num_waiting_reqs=2))
    limit.admit(1, 4)
    with pytest.raises(QueueFullError, match="4 requests would wait"):
        limit.admit(1, 5)
    limit.observe(SchedulerStats(num_running_reqs=5))
    limit.observe(None)
    limit.admit(1, 5)


def test_tokens_that_wait_count():
    limit = QueueLimit(None, 1, max_num_tokens=100)
    limit.admit_tokens(500, lambda: 0)  # nobody is before it
    limit.admit_tokens(60, lambda: 40)
    with pytest.raises(QueueFullError, match=r"101 tokens would wait, at most 100") as refused:
        limit.admit_tokens(61, lambda: 40)
    assert refused.value.limit == "max_num_queued_tokens"
    QueueLimit(None, 1).admit_tokens(10**9, lambda: 10**9)


def test_what_finished_since_the_report_does_not_wait():
    limit = QueueLimit(2, 100)
    limit.observe(SchedulerStats(num_waiting_reqs=2))
    limit.admit(1, 1)


def test_several_cores_run_as_many_each_and_their_queues_add_up():
    limit = QueueLimit(2, 4, num_cores=2)
    limit.admit(1, 9)
    with pytest.raises(QueueFullError, match="3 requests would wait"):
        limit.admit(1, 10)
    limit.observe(SchedulerStats(num_waiting_reqs=1), 0)
    limit.observe(SchedulerStats(num_waiting_reqs=1), 1)
    with pytest.raises(QueueFullError, match="3 requests would wait"):
        limit.admit(1, 4)
    limit.observe(SchedulerStats(num_waiting_reqs=0), 1)
    limit.admit(1, 4)
