"""What is measured beside the default metrics, and how the log looks."""

from dataclasses import dataclass

from vllm.config.options import Limit, check_options, option

_GROUP = "observability"


@dataclass(frozen=True)
class ObservabilityConfig:
    """Optional measurements.

    Attributes:
        log_stats: Log throughput and cache use every ``VLLM_LOG_STATS_INTERVAL`` seconds.
        show_hidden_metrics: Whether metrics also appear under names of earlier versions.
        log_format: "text" or "json".
    """

    kv_cache_metrics: bool = option(
        False,
        "Histograms of how long blocks of the KV cache live and lie idle, on a sample.",
        group=_GROUP,
    )
    kv_cache_metrics_sample: float = option(
        0.01,
        "Share of the blocks that is sampled, above 0 to 1. Default: 0.01.",
        group=_GROUP,
        metavar="SHARE",
        limit=Limit(lambda share: 0 < share <= 1, "must be above 0 and at most 1."),
    )
    enable_mfu_metrics: bool = False
    log_stats: bool = True
    cache_trace: str | None = option(
        None,
        "Record what decides about the prefix cache, hashes and no text, for vllm cache simulate "
        "and explain.",
        group="KV cache",
        metavar="FILE",
        more="See `docs/cache_trace.md`.",
    )
    cache_trace_max_bytes: int = option(
        256 * 1024 * 1024,
        "Of the trace and the part before it (FILE.1), together. Default: 256M.",
        group="KV cache",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Send an OpenTelemetry span for each request to this collector "
        "(http://host:4318/v1/traces); needs the otel extra.",
        group=_GROUP,
        metavar="URL",
        limit=Limit(
            lambda url: "://" in url,
            "must be a URL: http://host:4318/v1/traces, or grpc://host:4317.",
        ),
    )
    show_hidden_metrics: bool = False
    log_format: str = "text"
    logging_config: str | None = option(
        None,
        "A JSON or YAML file for logging.config.dictConfig, over our own settings.",
        group=_GROUP,
        also=("--log-config-file",),
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check_options(self)
