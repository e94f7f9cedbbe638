"""Metrics of the HTTP edge, under the names of prometheus-fastapi-instrumentator."""

from prometheus_client import CollectorRegistry, Counter, Histogram

# Probes and scrapes would drown the requests.
_EXCLUDED = frozenset({"/metrics", "/health", "/ready", "/ping", "/version", "/load"})


class HttpMetrics:
    """Counts and times requests by route.

    Owns: its two metrics in ``registry``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "Requests by route, method and status class.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Time until the last byte of the response, by route.",
            ("handler", "method"),
            buckets=(0.1, 0.5, 1, 5, 10, 30, 60),
            registry=registry,
        )

    def observe(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """Count one request.

        Args:
            handler: Its route's path template, "none" for an unknown route.
            method: Its HTTP method.
            status: Of the response.
            duration_s: Until its last byte.
        """
        if handler in _EXCLUDED:
            return
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(duration_s)
