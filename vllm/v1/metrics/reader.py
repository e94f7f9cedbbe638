"""``LLM.get_metrics``: the metrics of a registry as plain objects.

Names are those of ``/metrics``, without the ``_total`` that counters carry there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

# A counter whose series are the elements of one list, by this label.
_VECTORS = {"vllm:spec_decode_num_accepted_tokens_per_pos": "position"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: a metric's name and the values of its labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A count that only grows; of seconds it may be a fraction."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value of this moment."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counts that belong together, by position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Samples in buckets.

    Attributes:
        buckets: Upper bound, as text (the last is "+Inf") -> samples up to there.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Return every ``vllm:`` series of a registry as it stands now."""
    return [
        metric
        for family in registry.collect()
        if family.name.startswith("vllm:")
        for metric in _read_family(family)
    ]


def _read_family(family: Family) -> Iterator[Metric]:
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "gauge":
        for sample in samples:
            yield Gauge(family.name, sample.labels, sample.value)
    elif family.type == "counter" and family.name in _VECTORS:
        yield from _read_vectors(family.name, samples)
    elif family.type == "counter":
        for sample in samples:
            value = sample.value
            whole = int(value) if value.is_integer() else value
            yield Counter(family.name, sample.labels, whole)
    elif family.type == "histogram":
        yield from _read_histograms(family.name, samples)


def _grouped(samples: list[Sample], without: str) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    """Group samples by their labels other than one."""
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        rest = tuple((k, v) for k, v in sample.labels.items() if k != without)
        groups.setdefault(rest, []).append(sample)
    for key, members in groups.items():
        yield dict(key), members


def _read_vectors(name: str, samples: list[Sample]) -> Iterator[Metric]:
    label = _VECTORS[name]
    for labels, members in _grouped(samples, label):
        values = [0] * (1 + max(int(sample.labels[label]) for sample in members))
        for sample in members:
            values[int(sample.labels[label])] = int(sample.value)
        yield Vector(name, labels, values)


def _read_histograms(name: str, samples: list[Sample]) -> Iterator[Metric]:
    for labels, members in _grouped(samples, "le"):
        buckets = {s.labels["le"]: int(s.value) for s in members if s.name.endswith("_bucket")}
        totals = {s.name.removeprefix(f"{name}_"): s.value for s in members if "le" not in s.labels}
        yield Histogram(name, labels, int(totals["count"]), totals["sum"], buckets)
