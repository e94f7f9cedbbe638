"""What every sink of ``vllm:`` metrics shares: names, labels, where they are registered."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ENGINE_LABELS = ("model_name", "engine")

_Family = TypeVar("_Family", Counter, Gauge, Histogram)


class SharedRegistry(CollectorRegistry):
    """A registry where the sinks of several engines meet in one metric, told apart by labels.

    Owns: the metrics made here, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._families: dict[str, object] = {}

    def get_or_make(self, name: str, make: Callable[[], _Family]) -> _Family:
        """Return the metric of a name: the one that is there, or a new one."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = make()
        return family  # type: ignore[return-value]  # a name stands for one kind of metric


class PrometheusSink:
    """Makes metrics of one engine.

    Args:
        registry: Where the metrics are registered; a ``SharedRegistry`` for several engines.
        model_name: Of the label ``model_name``.
        engine_index: Of the label ``engine``.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_index: int = 0) -> None:
        self._registry = registry
        self._labels = (model_name, str(engine_index))
        # What gauges show: most steps change none of them, and setting one takes a lock.
        self._shown: dict[Gauge, float] = {}

    def _make(self, name: str, make: Callable[[], _Family]) -> _Family:
        if isinstance(self._registry, SharedRegistry):
            return self._registry.get_or_make(name, make)
        return make()

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters_of(name, text, ENGINE_LABELS).labels(*self._labels)

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return self._counters_of(name, text, (*ENGINE_LABELS, label))

    def _counters_of(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        make = partial(Counter, f"vllm:{name}", text, labels, registry=self._registry)
        return self._make(name, make)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._labelled_gauge(name, text).labels(*self._labels)

    def _labelled_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        names = (*ENGINE_LABELS, *labels)
        return self._make(
            name, partial(Gauge, f"vllm:{name}", text, names, registry=self._registry)
        )

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return self._histograms_of(name, text, buckets, ENGINE_LABELS).labels(*self._labels)

    def _histograms_of(
        self, name: str, text: str, buckets: Iterable[float], labels: tuple[str, ...]
    ) -> Histogram:
        make = partial(
            Histogram,
            f"vllm:{name}",
            text,
            labels,
            buckets=tuple(buckets),
            registry=self._registry,
        )
        return self._make(name, make)

    def _show(self, gauge: Gauge, value: float) -> None:
        """Set a gauge that this sink alone sets."""
        if self._shown.get(gauge) != value:
            self._shown[gauge] = value
            gauge.set(value)

    def log(self) -> None:
        """Nothing to write: Prometheus asks."""
