"""Metrics as a dictionary."""

from collections.abc import Iterable

from vllm.v1.metrics.reader import Counter, Gauge, Metric

_ENGINE = ("model_name", "engine")


def values_of(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return counters and gauges by name, a further label's value behind a colon."""
    return {
        ":".join([m.name, *(v for k, v in m.labels.items() if k not in _ENGINE)]): m.value
        for m in metrics
        if isinstance(m, Counter | Gauge)
    }
