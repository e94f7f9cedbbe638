"""Metrics of several processes as one."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from vllm.entrypoints.openai.metrics_exchange import MetricsExchange, merge_metrics
from vllm.exceptions import EngineError


def make_registry(count: int, level: float, *seconds: float, label: str = "a") -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("answers", "Answers.", ["name"], registry=registry).labels(label).inc(count)
    Gauge("level", "A level.", registry=registry).set(level)
    times = Histogram("times", "Times.", buckets=(1.0, 2.0), registry=registry)
    for value in seconds:
        times.observe(value)
    return registry


def read(text: bytes) -> dict[tuple[str, str], float]:
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def collect(folder: Path, *registries: CollectorRegistry) -> list[bytes]:
    exchanges = [
        MetricsExchange(str(folder), i + 1, len(registries)) for i in range(len(registries))
    ]
    for exchange, registry in zip(exchanges, registries, strict=True):
        await exchange.start(registry)
    try:
        return [await exchange.collect() for exchange in exchanges]
    finally:
        for exchange in exchanges:
            exchange.stop()


async def test_whoever_is_asked_tells_the_sums(tmp_path: Path) -> None:
    told = await collect(
        tmp_path,
        make_registry(3, 0.0, 0.5, 5.0),
        make_registry(4, 7.5, 1.5),
        make_registry(1, 2.0, label="b"),
    )
    expected = {
        ("answers_total", "a"): 7.0,
        ("answers_total", "b"): 1.0,
        ("level", ""): 7.5,
        ("times_bucket", "1.0"): 1.0,
        ("times_bucket", "2.0"): 2.0,
        ("times_bucket", "+Inf"): 3.0,
        ("times_count", ""): 3.0,
        ("times_sum", ""): 7.0,
    }
    assert [read(text) for text in told] == [expected] * 3


async def test_a_process_that_does_not_answer_is_an_error_not_a_smaller_sum(tmp_path: Path) -> None:
    exchange = MetricsExchange(str(tmp_path), 1, 2)
    await exchange.start(make_registry(1, 1.0))
    with pytest.raises(EngineError, match="Another API server process"):
        await asyncio.wait_for(exchange.collect(), 30)
    exchange.stop()


def test_what_every_process_counts_in_full_counts_once() -> None:
    text = b"# HELP vllm:engine_core_deaths_total x\n# TYPE vllm:engine_core_deaths_total counter\n"
    text += b'vllm:engine_core_deaths_total{engine="1"} 2.0\n'
    assert read(merge_metrics([text, text])) == {("vllm:engine_core_deaths_total", "1"): 2.0}
