"""``vllm bench latency``: what it makes of its flags."""

import argparse
from typing import Any

import pytest

from vllm.benchmarks.flags import add_latency_flags
from vllm.benchmarks.offline import run_latency
from vllm.exceptions import ConfigError


class _Stopped(Exception):
    """The engine would start now."""


def _start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Return the model and the settings that an engine would be built from."""
    given: list[tuple[str, dict[str, Any]]] = []

    def make(model: str, **settings: Any) -> None:
        given.append((model, settings))
        raise _Stopped

    monkeypatch.setattr("vllm.entrypoints.llm.LLM", make)
    parser = argparse.ArgumentParser()
    add_latency_flags(parser)
    with pytest.raises(_Stopped):
        run_latency(parser.parse_args(arguments))
    return given[0]


def test_only_what_differs_from_the_defaults_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _start(monkeypatch) == ("deepseek-v4", {})
    flags = ("--block-size", "64", "--hf-overrides", '{"a": 1}', "--no-enable-prefix-caching")
    settings = {"block_size": 64, "hf_overrides": {"a": 1}, "enable_prefix_caching": False}
    assert _start(monkeypatch, "--model", "m", *flags) == ("m", settings)


def test_an_empty_batch_is_refused() -> None:
    parser = argparse.ArgumentParser()
    add_latency_flags(parser)
    with pytest.raises(ConfigError, match="batch-size"):
        run_latency(parser.parse_args(["--batch-size", "0"]))
