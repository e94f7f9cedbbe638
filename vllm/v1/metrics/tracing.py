"""OpenTelemetry: a span for each request that ended, under its caller's trace.

The library is the ``otel`` extra; it is imported only where an endpoint was given.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.metrics.iteration_stats import FinishedRequestStats, IterationStats, RequestSummary
from vllm.v1.metrics.stats import SchedulerStats

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACE_HEADERS = ("traceparent", "tracestate")
# Those of the HTTP request that the running task answers; requests it makes carry them.
current_trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar(
    "current_trace_headers", default=None
)

_NS_PER_S = 1_000_000_000


class TracingStatLogger:
    """A StatLogger that sends a span for each request.

    Owns: the tracer, whose thread sends spans in batches and whose exit hook sends the last ones.

    Args:
        model_name: Of the attribute ``gen_ai.response.model``.
        exporter: Where spans go.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import (  # noqa: PLC0415
            OTELResourceDetector,
            Resource,
        )
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        self._model_name = model_name
        # What is given to create goes before the variables of the SDK: ours must go behind them.
        named = OTELResourceDetector().detect().attributes.get("service.name")
        own = {} if named else {"service.name": "vllm"}
        self._provider = TracerProvider(resource=Resource.create(own))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vllm.llm_engine")

    def record(
        self, _scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Make a span for each request that ended in this step."""
        for finished in () if iteration_stats is None else iteration_stats.finished_requests:
            if finished.summary is not None:
                self._send(finished, finished.summary)

    def _send(self, finished: FinishedRequestStats, summary: RequestSummary) -> None:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        parent = TraceContextTextMapPropagator().extract(dict(summary.trace_headers))
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=end_ns - round(finished.e2e_latency * _NS_PER_S),
            attributes=self._attributes(finished, summary),
        )
        span.end(end_ns)

    def _attributes(
        self, finished: FinishedRequestStats, summary: RequestSummary
    ) -> dict[str, Any]:
        given = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [str(finished.finish_reason)],
            "gen_ai.request.id": summary.request_id,
            "gen_ai.request.max_tokens": finished.max_tokens,
            "gen_ai.request.temperature": summary.temperature,
            "gen_ai.request.top_p": summary.top_p,
            "gen_ai.request.n": finished.n,
            "gen_ai.usage.prompt_tokens": finished.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": summary.num_generation_tokens,
            "gen_ai.usage.cache_read.input_tokens": summary.num_cached_tokens,
            "gen_ai.latency.time_in_queue": finished.queued_time,
            "gen_ai.latency.time_to_first_token": summary.time_to_first_token,
            "gen_ai.latency.e2e": finished.e2e_latency,
            "gen_ai.latency.time_in_model_prefill": finished.prefill_time,
            "gen_ai.latency.time_in_model_decode": finished.decode_time,
            "gen_ai.latency.time_in_model_inference": finished.inference_time,
        }
        return {name: value for name, value in given.items() if value is not None}

    def log(self) -> None:
        """Nothing to write: spans go out by themselves."""

    def shutdown(self) -> None:
        """Send what is left and stop the thread."""
        self._provider.shutdown()


def make_exporter(endpoint: str) -> SpanExporter:
    """Return what sends spans to a collector.

    Args:
        endpoint: grpc://host:4317, or http://host:4318/v1/traces, which is gRPC too where
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says so.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "grpc" or envs.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc  # noqa: PLC0415

        is_insecure = scheme != "https"
        return grpc.OTLPSpanExporter(endpoint=address, insecure=is_insecure)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http  # noqa: PLC0415

    return http.OTLPSpanExporter(endpoint=endpoint)
