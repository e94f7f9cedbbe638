"""What is measured beside the default metrics, and how the log looks."""

from dataclasses import dataclass

from vllm.exceptions import ConfigError


@dataclass(frozen=True)
class ObservabilityConfig:
    """Optional measurements.

    Attributes:
        kv_cache_metrics: Sample block lifetimes into histograms.
        kv_cache_metrics_sample: Share of blocks sampled.
        cache_trace: File in which what decides about the prefix cache is recorded; None: nowhere.
        cache_trace_max_bytes: Of that file and the one before it, together.
        log_stats: Log throughput and cache use every ``VLLM_LOG_STATS_INTERVAL`` seconds.
        otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span per request.
        show_hidden_metrics: Whether metrics also appear under names of earlier versions.
        log_format: "text" or "json".
        logging_config: A file for ``logging.config.dictConfig``.
    """

    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    enable_mfu_metrics: bool = False
    log_stats: bool = True
    cache_trace: str | None = None
    cache_trace_max_bytes: int = 256 * 1024 * 1024
    otlp_traces_endpoint: str | None = None
    show_hidden_metrics: bool = False
    log_format: str = "text"
    logging_config: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.kv_cache_metrics_sample <= 1:
            raise ConfigError(
                f"kv_cache_metrics_sample={self.kv_cache_metrics_sample:g} must be above 0 and at "
                "most 1."
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and "://" not in endpoint:
            raise ConfigError(
                f"otlp_traces_endpoint={endpoint!r} must be a URL: http://host:4318/v1/traces, or "
                "grpc://host:4317."
            )
