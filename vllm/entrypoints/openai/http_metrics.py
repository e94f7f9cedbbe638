"""Metrics of the HTTP edge, under the names of prometheus-fastapi-instrumentator."""

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

# Probes and scrapes would drown the requests.
_EXCLUDED = frozenset({"/metrics", "/health", "/ready", "/ping", "/version", "/load"})
_FINE_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5),
    *(7.5, 10, 30, 60),
)


class HttpMetrics:
    """Counts, times and weighs requests by route.

    Owns: its metrics in ``registry``.
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
        self._fine_duration = Histogram(
            "http_request_duration_highr_seconds",
            "Time until the last byte of the response, of all routes, in finer buckets.",
            buckets=_FINE_BUCKETS,
            registry=registry,
        )
        self._request_size = Summary(
            "http_request_size_bytes",
            "Bytes of request bodies that say their length, by route.",
            ("handler",),
            registry=registry,
        )
        self._response_size = Summary(
            "http_response_size_bytes",
            "Bytes of response bodies, by route.",
            ("handler",),
            registry=registry,
        )

    def observe(
        self,
        handler: str,
        method: str,
        status: int,
        duration_s: float,
        *,
        request_bytes: int = 0,
        response_bytes: int = 0,
    ) -> None:
        """Count one request.

        Args:
            handler: Its route's path template, "none" for an unknown route.
            method: Its HTTP method.
            status: Of the response.
            duration_s: Until its last byte.
            request_bytes: As its Content-Length said; 0 if it did not.
            response_bytes: Sent in the body.
        """
        if handler in _EXCLUDED:
            return
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(duration_s)
        self._fine_duration.observe(duration_s)
        self._request_size.labels(handler).observe(request_bytes)
        self._response_size.labels(handler).observe(response_bytes)
