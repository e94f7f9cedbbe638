"""Metrics of the tiers behind the KV cache's pool: host memory and a disk."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.metrics.prometheus_sink import PrometheusSink
from vllm.v1.metrics.stats import OffloadStats, SchedulerStats

_TIERS = {"host": "0:primary", "disk": "1:fs"}
_SKIPPED = ("no_room", "over_budget", "unproven", "superseded", "dropped")
_STORES = ("stored", "failed", *_SKIPPED, "evicted")
_RESTORES = ("restored", "declined", "corrupt", "failed")
_KINDS = ("capacity", "used", "live")


class OffloadMetrics(PrometheusSink):
    """A StatLogger of what the tiers behind the pool do and hold.

    Owns: its metrics in ``registry``.

    Args:
        registry: Where the metrics are registered.
        model_name: Of the label ``model_name``.
        engine_index: Of the label ``engine``.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, engine_index: int = 0) -> None:
        super().__init__(registry, model_name, engine_index)
        self._load_bytes = self._counter("kv_offload_load_bytes", "Bytes brought back.")
        self._load_time = self._counter(
            "kv_offload_load_time", "Seconds that restores took, from their orders on."
        )
        self._store_bytes = self._counter("kv_offload_store_bytes", "Bytes kept.")
        self._store_time = self._counter(
            "kv_offload_store_time", "Processor seconds of keeping them."
        )
        self._skipped = self._counter(
            "kv_offload_stores_skipped", "Objects that were not kept after all."
        )
        self._dropped = self._counter(
            "kv_offload_tiering_backpressure_stores_dropped",
            "Of those, objects that the pool gave up, or that too many others were before.",
        )
        self._read = self._by_tier("read_bytes", "Bytes brought back, by tier.")
        self._read_time = self._by_tier("read_time", "Seconds of restores, by tier.")
        self._write = self._by_tier("write_bytes", "Bytes written, by tier.")
        self._write_time = self._by_tier("write_time", "Processor seconds of writes, by tier.")
        self._queries = self._by_tier("chunk_queries", "Objects to bring back, by tier asked.")
        self._hits = self._by_tier("chunk_hits", "Of those, objects that the tier had.")
        self._failures = self._counter(
            "kv_offload_tiering_promotion_job_failures", "Restores that failed."
        )
        self._corrupt = self._counter(
            "kv_offload_tiering_checksum_failures",
            "Objects whose bytes were not those that were written.",
        )
        self._stores = self._outcomes("store", "Objects, by what became of them.", _STORES)
        self._restores = self._outcomes("restore", "Prefixes, by what became of them.", _RESTORES)
        self._host_usage = self._gauge(
            "kv_offload_cpu_cache_usage_perc", "Share of the host tier in use, 0 to 1."
        )
        disk = self._labelled_gauge("kv_offload_disk_bytes", "Bytes of the disk tier.", "kind")
        self._disk = {kind: disk.labels(*self._labels, kind) for kind in _KINDS}

    def _by_tier(self, name: str, text: str) -> Counter:
        counter = self._labelled_counter(f"kv_offload_tiering_{name}", text, "tier")
        for label in _TIERS.values():
            counter.labels(*self._labels, label)
        return counter

    def _outcomes(self, name: str, text: str, values: tuple[str, ...]) -> Counter:
        counter = self._labelled_counter(f"kv_offload_{name}_outcomes", text, "outcome")
        for value in values:
            counter.labels(*self._labels, value)
        return counter

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
    ) -> None:
        """Take in one step."""
        stats = None if scheduler_stats is None else scheduler_stats.offload
        if stats is None:
            return
        self._load_bytes.inc(sum(stats.read_bytes.values()))
        self._load_time.inc(sum(stats.read_seconds.values()))
        self._store_bytes.inc(sum(stats.write_bytes.values()))
        self._store_time.inc(sum(stats.write_seconds.values()))
        self._skipped.inc(sum(stats.stores.get(name, 0) for name in _SKIPPED))
        self._dropped.inc(stats.stores.get("dropped", 0))
        for counter, counts in (
            (self._read, stats.read_bytes),
            (self._read_time, stats.read_seconds),
            (self._write, stats.write_bytes),
            (self._write_time, stats.write_seconds),
            (self._queries, stats.queries),
            (self._hits, stats.hits),
        ):
            self._add(counter, {_TIERS[name]: count for name, count in counts.items()})
        self._add(self._stores, stats.stores)
        self._add(self._restores, stats.restores)
        self._failures.inc(sum(stats.restores.get(name, 0) for name in ("corrupt", "failed")))
        self._corrupt.inc(stats.num_corrupt)
        self._show_sizes(stats)

    def _add(self, counter: Counter, counts: Mapping[str, float]) -> None:
        for label, count in counts.items():
            if count:
                counter.labels(*self._labels, label).inc(count)

    def _show_sizes(self, stats: OffloadStats) -> None:
        if stats.capacity_bytes.get("host"):
            share = stats.used_bytes["host"] / stats.capacity_bytes["host"]
            self._show(self._host_usage, share)
        for kind, sizes in zip(
            _KINDS, (stats.capacity_bytes, stats.used_bytes, stats.live_bytes), strict=True
        ):
            self._show(self._disk[kind], float(sizes.get("disk", 0)))
