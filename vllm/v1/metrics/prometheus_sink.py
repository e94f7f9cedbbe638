"""What every sink of ``vllm:`` metrics shares: names, labels, where they are registered."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ENGINE_LABELS = ("model_name", "engine")


class PrometheusSink:
    """Makes metrics of one engine.

    Args:
        registry: Where the metrics are registered.
        model_name: Of the label ``model_name``.
        engine_index: Of the label ``engine``.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_index: int = 0) -> None:
        self._registry = registry
        self._labels = (model_name, str(engine_index))

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, ENGINE_LABELS, registry=self._registry)
        return counter.labels(*self._labels)

    def _labelled_counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*ENGINE_LABELS, label), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", text, ENGINE_LABELS, registry=self._registry)
        return gauge.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", text, ENGINE_LABELS, buckets=tuple(buckets), registry=self._registry
        )
        return histogram.labels(*self._labels)

    def log(self) -> None:
        """Nothing to write: Prometheus asks."""
