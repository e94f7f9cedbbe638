"""``vllm cache``: simulate, explain."""

from typing import Any

from vllm.benchmarks.flags import add_explain_flags, add_simulate_flags
from vllm.entrypoints.cli.kinds import Kind, add_kinds

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
)


def add_parser(commands: Any) -> None:
    """Add the command and its own commands."""
    add_kinds(commands, "cache", "Ask a recorded prefix cache.", _KINDS)
