"""docs/metrics.md lists exactly the metrics there are, and the labels of cache_config_info."""

import re
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from vllm.config import VllmConfig
from vllm.config.observability import ObservabilityConfig
from vllm.entrypoints.openai.client_metrics import ClientMetrics
from vllm.entrypoints.openai.http_metrics import HttpMetrics
from vllm.entrypoints.openai.http_server import cache_labels
from vllm.v1.engine.wire import KVCacheInfo
from vllm.v1.metrics.sinks import make_sinks

DOC = (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text("utf-8")
INFO = KVCacheInfo(9, 9, 9, 1.0, 9, 32, 32, 32, "words", ())


def test_every_metric_is_described_and_no_other() -> None:
    registry = CollectorRegistry()
    everything = ObservabilityConfig(kv_cache_metrics=True, show_hidden_metrics=True)
    default, _ = make_sinks(registry, "m", 1000, everything, has_tiers=True, tenants=("default",))
    default.set_cache_config(cache_labels(VllmConfig(), INFO))
    HttpMetrics(registry)
    ClientMetrics(registry)
    rows = dict(re.findall(r"^\| `([a-z_:0-9]+)` \| (\w+)", DOC, flags=re.MULTILINE))
    assert rows == {metric.name: metric.type for metric in registry.collect()}


def test_every_label_of_the_cache_is_described() -> None:
    described = DOC.split("The labels of `vllm:cache_config_info`")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", described)) - {"None"} == set(
        cache_labels(VllmConfig(), INFO)
    )


def test_the_type_of_cached_rows_is_the_one_that_was_found() -> None:
    info = msgspec.structs.replace(INFO, cache_dtype="float16")
    assert cache_labels(VllmConfig(), info)["cache_dtype"] == "float16"
