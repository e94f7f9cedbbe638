"""Numbers, cache report and table of made-up observations."""

import pytest

from vllm.benchmarks.client.observation import Observation, Usage
from vllm.benchmarks.report.cache import cache_numbers
from vllm.benchmarks.report.metrics import (
    measure,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    percentile,
)
from vllm.benchmarks.report.table import format_table
from vllm.exceptions import ConfigError


def _seen(
    start: float, chunks: list[float], cached: int | None = None, turn: int | None = None
) -> Observation:
    reasons = None if cached is None else {"first_seen": 100 - cached}
    return Observation(
        start_s=start,
        turn=turn,
        num_prompt_tokens=100,
        num_output_tokens=len(chunks),
        chunk_s=chunks,
        latency_s=chunks[-1],
        usage=Usage(cached_tokens=cached, miss_tokens=reasons),
    )


FAILED = Observation(error="HTTP 500: no", num_prompt_tokens=100)
RUN = [
    _seen(0.0, [0.4, 0.5, 0.6], 0, 0),
    _seen(0.5, [0.1, 0.3], 96, 1),
    _seen(2.0, [0.2], 64, 1),
    FAILED,
]


def test_numbers_of_a_run() -> None:
    values = measure(RUN, 4.0, (99,), {"ttft": 250.0}).values
    assert (values["completed"], values["failed"]) == (3, 1)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (300, 6)
    assert values["output_throughput"] == 1.5
    assert values["request_goodput"] == 0.5
    assert values["median_ttft_ms"] == pytest.approx(200.0)
    assert values["mean_tpot_ms"] == pytest.approx(150.0)
    assert values["mean_itl_ms"] == pytest.approx(400 / 3)
    assert values["max_concurrent_requests"] == 2
    assert values["max_output_tokens_per_s"] == 5.0


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([], 50) == 0.0


def test_the_cache_report_tells_hits_from_misses_by_turn() -> None:
    cache = cache_numbers(RUN, (99,))
    assert (cache["cached_tokens"], cache["hit_rate"]) == (160, pytest.approx(160 / 300))
    assert cache["hits_mean_ttft_ms"] == pytest.approx(150.0)
    assert cache["misses_mean_ttft_ms"] == pytest.approx(400.0)
    assert [(row["turn"], row["hit_rate"]) for row in cache["by_turn"]] == [(0, 0.0), (1, 0.8)]
    assert cache["miss_tokens"] == {"first_seen": 140}
    assert cache_numbers(RUN, (99,), {"evicted": 9})["miss_tokens"] == {"first_seen": 140}


def test_reasons_come_from_counters_where_answers_give_none() -> None:
    seen = [_seen(0.0, [0.1], 64)]
    seen[0].usage.miss_tokens = None
    cache = cache_numbers(seen, (99,), {"evicted": 9})
    assert cache["miss_tokens"] == {"evicted": 9}


def test_what_is_not_reported_is_absent() -> None:
    silent = [_seen(0.0, [0.1]), _seen(0.0, [0.2])]
    assert cache_numbers(silent, (99,)) == {}
    table = _table(silent)
    assert "The server reports no cached tokens." in table
    assert "Hit rate" not in table


def _table(seen: list[Observation]) -> str:
    return format_table(
        measure(seen, 1.0, (50, 99.9), {}).values,
        cache_numbers(seen, (50, 99.9)),
        metrics=("ttft", "e2el"),
        percents=(50, 99.9),
        request_rate=float("inf"),
        max_concurrency=8,
    )


def test_the_table_shows_what_was_asked_for() -> None:
    table = _table(RUN)
    for text in (
        "Failed requests:                         1",
        "P99.9 TTFT (ms):",
        "Mean E2EL (ms):",
    ):
        assert text in table
    assert "ITL" not in table
    assert "Request rate" not in table
    assert "Turn 1: hit rate (%), mean TTFT (ms):    80.00, 150.00" in table


@pytest.mark.parametrize("text", ["ttft:x", "ttft", "itl:5", "ttft:-1"])
def test_senseless_goodput_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput([text])


def test_senseless_metrics_and_percentiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="speed"):
        parse_metrics("ttft,speed")
    for text in ("x", "101"):
        with pytest.raises(ConfigError, match="metric-percentiles"):
            parse_percentiles(text)
