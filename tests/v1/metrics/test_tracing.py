"""A span for each request."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from vllm.v1.messages import FinishReason
from vllm.v1.metrics.iteration_stats import FinishedRequestStats, IterationStats, RequestSummary
from vllm.v1.metrics.tracing import TracingStatLogger, make_exporter

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


def _finished(**changes: Any) -> FinishedRequestStats:
    summary = RequestSummary(
        request_id="r",
        trace_headers=changes.pop("trace_headers", {}),
        temperature=0.5,
        top_p=0.9,
        num_generation_tokens=30,
        num_cached_tokens=64,
        time_to_first_token=0.25,
    )
    values: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "e2e_latency": 2.0,
        "num_prompt_tokens": 100,
        "max_tokens": 50,
        "queued_time": 0.125,
        "n": 2,
        "summary": summary,
    }
    return FinishedRequestStats(**{**values, **changes})


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def sink(exporter: InMemorySpanExporter) -> Iterator[TracingStatLogger]:
    sink = TracingStatLogger("m", exporter)
    yield sink
    sink.shutdown()


def _spans(
    sink: TracingStatLogger, exporter: InMemorySpanExporter, *finished: FinishedRequestStats
) -> list[ReadableSpan]:
    sink.record(None, IterationStats(finished_requests=list(finished)))
    sink.record(None, None)
    sink.log()
    sink.shutdown()
    return list(exporter.get_finished_spans())


def test_attributes(sink: TracingStatLogger, exporter: InMemorySpanExporter) -> None:
    (span,) = _spans(sink, exporter, _finished())
    assert (span.name, span.kind, span.parent) == ("llm_request", SpanKind.SERVER, None)
    assert span.attributes is not None
    attributes = dict(span.attributes)
    for name, value in {
        "gen_ai.request.id": "r",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.latency.time_in_queue": 0.125,
        "gen_ai.latency.time_to_first_token": 0.25,
        "gen_ai.latency.e2e": 2.0,
    }.items():
        assert attributes[name] == value, name
    assert span.start_time is not None
    assert span.end_time == span.start_time + 2_000_000_000


def test_a_span_hangs_under_its_callers(
    sink: TracingStatLogger, exporter: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    (span,) = _spans(sink, exporter, _finished(trace_headers=headers))
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert f"{span.context.trace_id:032x}" == TRACE_ID


def test_a_caller_that_sends_nonsense_gets_a_trace_of_its_own(
    sink: TracingStatLogger, exporter: InMemorySpanExporter
) -> None:
    (span,) = _spans(sink, exporter, _finished(trace_headers={"traceparent": "nonsense"}))
    assert span.parent is None


def test_only_the_last_of_several_answers_ends_a_request(
    sink: TracingStatLogger, exporter: InMemorySpanExporter
) -> None:
    assert len(_spans(sink, exporter, _finished(summary=None), _finished())) == 1


@pytest.mark.parametrize(
    ("endpoint", "protocol", "kind"),
    [
        ("http://127.0.0.1:9/v1/traces", "", "proto.http"),
        ("http://127.0.0.1:9", "grpc", "proto.grpc"),
        ("grpc://127.0.0.1:9", "", "proto.grpc"),
    ],
)
def test_the_way_to_a_collector(
    endpoint: str, protocol: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    exporter = make_exporter(endpoint)
    assert kind in type(exporter).__module__
    exporter.shutdown()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "vllm"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,team=a"}, "theirs"),
    ],
)
def test_the_service_is_named_by_the_variables_of_the_sdk(
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    name: str,
) -> None:
    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    (span,) = _spans(TracingStatLogger("m", exporter), exporter, _finished())
    assert span.resource.attributes["service.name"] == name
    assert span.resource.attributes.get("team") == ("a" if "theirs" in name else None)
