"""``vllm cache``: simulate, explain, and what a folder keeps."""

import argparse
from pathlib import Path
from typing import Any

from vllm.benchmarks.flags import add_explain_flags, add_simulate_flags
from vllm.entrypoints.cli.kinds import Kind, add_kinds


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="What --prefix-cache-dir named.")


def _add_ls_flags(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--json", action="store_true", help="Print one JSON list.")


_KINDS = (
    Kind(
        "simulate",
        "Replay a recorded cache, as it was and under other settings.",
        add_simulate_flags,
        "cachelab.twin.simulate:run_simulate",
    ),
    Kind(
        "explain",
        "Say why a request missed, and what would have helped.",
        add_explain_flags,
        "cachelab.twin.explain:run_explain",
    ),
    Kind(
        "ls",
        "Say what a folder of cached prefixes keeps: counts and bytes, no content.",
        _add_ls_flags,
        "v1.kv_offload.inspect:run_ls",
    ),
    Kind(
        "verify",
        "Read all that a folder keeps; exits with 1 if some of it is damaged.",
        _add_folder,
        "v1.kv_offload.inspect:run_verify",
    ),
    Kind(
        "clear",
        "Remove all that a folder keeps; no server may use it.",
        _add_folder,
        "v1.kv_offload.inspect:run_clear",
    ),
)


def add_parser(commands: Any) -> None:
    """Add the command and its own commands."""
    add_kinds(commands, "cache", "Ask a recorded prefix cache, or one kept on disk.", _KINDS)
