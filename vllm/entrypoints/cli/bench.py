"""``vllm bench``: serve, latency, throughput, startup, replay."""

from typing import Any

from vllm.benchmarks.flags import (
    add_latency_flags,
    add_replay_flags,
    add_serve_flags,
    add_startup_flags,
    add_throughput_flags,
)
from vllm.entrypoints.cli.kinds import Kind, add_kinds

_KINDS = (
    Kind(
        "serve",
        "Load a running server and report its speed and its cache.",
        add_serve_flags,
        "benchmarks.serve:run_serve",
    ),
    Kind(
        "latency",
        "Time one batch, without HTTP.",
        add_latency_flags,
        "benchmarks.offline:run_latency",
    ),
    Kind(
        "throughput",
        "Time many prompts, without HTTP.",
        add_throughput_flags,
        "benchmarks.offline:run_throughput",
    ),
    Kind(
        "startup",
        "Time from the command to a healthy server.",
        add_startup_flags,
        "benchmarks.startup:run_startup",
    ),
    Kind(
        "replay",
        "Replay a trace through the server's own scheduler and cache, under a clock of its own.",
        add_replay_flags,
        "benchmarks.replay:run_replay",
    ),
)


def add_parser(commands: Any) -> None:
    """Add the command and its own commands."""
    add_kinds(commands, "bench", "Measure a server or the engine.", _KINDS)
