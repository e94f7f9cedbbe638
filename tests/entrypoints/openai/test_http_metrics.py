"""Metrics of the HTTP edge."""

from prometheus_client import CollectorRegistry

from vllm.entrypoints.openai.http_metrics import HttpMetrics


def test_status_classes_and_exclusions() -> None:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    for status in (200, 204, 503):
        metrics.observe("/v1/completions", "POST", status, 0.2)
    metrics.observe("/health", "GET", 200, 0.1)

    def count(handler: str, status: str) -> float | None:
        method = "GET" if handler == "/health" else "POST"
        labels = {"handler": handler, "method": method, "status": status}
        return registry.get_sample_value("http_requests_total", labels)

    assert count("/v1/completions", "2xx") == 2
    assert count("/v1/completions", "5xx") == 1
    assert count("/health", "2xx") is None
