"""What is measured beside the default metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObservabilityConfig:
    """Optional measurements.

    Attributes:
        kv_cache_metrics: Sample block lifetimes into histograms.
        kv_cache_metrics_sample: Share of blocks sampled.
        log_stats: Log throughput and cache use every ``VLLM_LOG_STATS_INTERVAL`` seconds.
    """

    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    enable_mfu_metrics: bool = False
    log_stats: bool = True
