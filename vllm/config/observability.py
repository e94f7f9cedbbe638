"""What is measured beside the default metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObservabilityConfig:
    """Optional measurements.

    Attributes:
        kv_cache_metrics: Sample block lifetimes into histograms.
        kv_cache_metrics_sample: Share of blocks sampled.
        cache_trace: File in which what decides about the prefix cache is recorded; None: nowhere.
        cache_trace_max_bytes: Of that file and the one before it, together.
        log_stats: Log throughput and cache use every ``VLLM_LOG_STATS_INTERVAL`` seconds.
    """

    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    enable_mfu_metrics: bool = False
    log_stats: bool = True
    cache_trace: str | None = None
    cache_trace_max_bytes: int = 256 * 1024 * 1024
