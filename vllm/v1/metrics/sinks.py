"""Which sinks an engine's configuration asks for."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from vllm.config.observability import ObservabilityConfig
from vllm.v1.metrics.loggers import StatLogger
from vllm.v1.metrics.prometheus import PrometheusStatLogger
from vllm.v1.metrics.prometheus_blocks import BlockMetrics
from vllm.v1.metrics.prometheus_cores import CoreMetrics
from vllm.v1.metrics.prometheus_offload import OffloadMetrics
from vllm.v1.metrics.prometheus_old_names import OldNames
from vllm.v1.metrics.prometheus_sources import SourceMetrics
from vllm.v1.metrics.prometheus_tenants import TenantMetrics
from vllm.v1.metrics.tracing import TracingStatLogger, make_exporter


def make_sinks(
    registry: CollectorRegistry,
    model_name: str,
    max_model_len: int,
    observability: ObservabilityConfig,
    engine_index: int = 0,
    external_source: str = "external_unspecified",
    has_tiers: bool = False,
    tenants: Collection[str] = (),
) -> tuple[PrometheusStatLogger, list[StatLogger]]:
    """Return the sink of Prometheus' default metrics, and the others.

    Args:
        registry: Where they register their metrics.
        model_name: Of the label ``model_name``.
        max_model_len: In tokens; the largest bucket of token histograms.
        observability: What is measured beside the default.
        engine_index: Of several engine cores, that of the label ``engine``.
        external_source: Where tokens lay that a KV connector loaded and does not tell of.
        has_tiers: Whether host memory or a disk keep what the pool gives up.
        tenants: Who shares the server.
    """
    engine = (registry, model_name, engine_index)
    others: list[StatLogger] = [SourceMetrics(*engine, external_source), CoreMetrics(*engine)]
    if has_tiers:
        others.append(OffloadMetrics(*engine))
    if tenants:
        others.append(TenantMetrics(*engine, tenants))
    if observability.kv_cache_metrics:
        others.append(BlockMetrics(*engine))
    if observability.show_hidden_metrics:
        others.append(OldNames(*engine))
    if observability.otlp_traces_endpoint is not None:
        exporter = make_exporter(observability.otlp_traces_endpoint)
        others.append(TracingStatLogger(model_name, exporter))
    return PrometheusStatLogger(registry, model_name, max_model_len, engine_index), others
