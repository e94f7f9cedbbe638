import logging

import pytest

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="vllm")
    return caplog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line(log):
    clock = Clock()
    sink = LoggingStatLogger(clock=clock)
    stats = IterationStats(
        num_prompt_tokens=300, num_cached_prompt_tokens=100, num_generation_tokens=55
    )
    cache = PrefixCacheStats(requests=1, queries=300, hits=100)
    sink.record(SchedulerStats(3, 1, 1, 0.256, cache), stats)
    clock.now += 10
    sink.log()
    assert log.records[-1].getMessage() == (
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, "
        "Avg generation throughput: 5.5 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, KV cache usage: 25.6%, Prefix cache hit rate: 33.3%"
    )
    assert log.records[-1].levelno == logging.INFO


def test_rates_are_those_of_the_interval(log):
    clock = Clock()
    sink = LoggingStatLogger(clock=clock)
    sink.record(None, IterationStats(num_generation_tokens=100))
    clock.now += 10
    sink.log()
    clock.now += 10
    sink.log()
    assert "generation throughput: 10.0" in log.records[-2].getMessage()
    assert "generation throughput: 0.0" in log.records[-1].getMessage()


def test_idle_lines_are_for_debugging_after_the_first(log):
    clock = Clock()
    sink = LoggingStatLogger(clock=clock)
    for work in (0, 9, 0, 0):
        sink.record(SchedulerStats(), IterationStats(num_generation_tokens=work))
        clock.now += 10
        sink.log()
    levels = [r.levelno for r in log.records]
    assert levels == [logging.DEBUG, logging.INFO, logging.INFO, logging.DEBUG]


def test_preemptions_show_when_there_are_any(log):
    sink = LoggingStatLogger(clock=Clock())
    sink.record(None, IterationStats(num_preemptions=2, num_generation_tokens=1))
    sink.log()
    assert "reqs, Preemptions: 2, KV cache usage" in log.records[-1].getMessage()


def test_drafts_have_a_line_of_their_own(log):
    clock = Clock()
    sink = LoggingStatLogger(clock=clock)
    drafted = SpecDecodingStats.new(3)
    for num_accepted in (0, 1, 3, 2):
        drafted.observe_draft(3, num_accepted)
    sink.record(SchedulerStats(spec_decoding_stats=drafted), IterationStats())
    clock.now += 10
    sink.log()
    assert log.records[-1].getMessage() == (
        "Engine 000: Drafted: 12 tokens, accepted: 6 (50.0%), mean accepted length: 2.50"
    )
    num_lines = len(log.records)
    clock.now += 10
    sink.log()
    assert all("Drafted" not in record.getMessage() for record in log.records[num_lines:])
