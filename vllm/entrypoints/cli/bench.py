"""``vllm bench``: serve, latency, throughput, startup."""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.benchmarks.flags import (
    add_latency_flags,
    add_serve_flags,
    add_startup_flags,
    add_throughput_flags,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One benchmark.

    Attributes:
        name: On the command line.
        text: What it does.
        add_flags: Adds its flags.
        run: "module:function", loaded when it runs: --help must not wait for clients and engines.
    """

    name: str
    text: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: str


_KINDS = (
    _Kind(
        "serve",
        "Load a running server and report its speed and its cache.",
        add_serve_flags,
        "serve:run_serve",
    ),
    _Kind("latency", "Time one batch, without HTTP.", add_latency_flags, "offline:run_latency"),
    _Kind(
        "throughput",
        "Time many prompts, without HTTP.",
        add_throughput_flags,
        "offline:run_throughput",
    ),
    _Kind(
        "startup",
        "Time from the command to a healthy server.",
        add_startup_flags,
        "startup:run_startup",
    ),
)


def add_parser(commands: Any) -> None:
    """Add the command and its own commands."""
    text = "Measure a server or the engine."
    parser = commands.add_parser("bench", help=text, description=text)
    kinds = parser.add_subparsers(dest="bench_command", metavar="WHAT", required=True)
    for kind in _KINDS:
        own = kinds.add_parser(kind.name, help=kind.text, description=kind.text)
        kind.add_flags(own)
        own.set_defaults(run=partial(_run, kind.run))


def _run(place: str, args: argparse.Namespace) -> int:
    module, _, function = place.partition(":")
    code: int = getattr(importlib.import_module(f"vllm.benchmarks.{module}"), function)(args)
    return code
