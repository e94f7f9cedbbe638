"""``vllm decisions``: fit the temperature of ``/v1/decisions``."""

import argparse
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.kinds import Kind, add_kinds


def _add_fit_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        help='One JSON object a line: {"input", "questions", "expected"}, which a server is asked, '
        'or {"logprobs", "label"}.',
    )
    parser.add_argument(
        "--url",
        default="http://localhost:8000/v1",
        help="Where the server's API is. Default: http://localhost:8000/v1.",
    )
    parser.add_argument("--model-name", help="A name the server knows. Default: its first.")
    parser.add_argument("--api-key", help="Default: OPENAI_API_KEY, if set.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


_KINDS = (
    Kind(
        "fit",
        "Find --decision-temperature from questions whose answers are known.",
        _add_fit_flags,
        "entrypoints.decisions.fit_command:run_fit",
    ),
)


def add_parser(commands: Any) -> None:
    """Add the command and its own commands."""
    add_kinds(commands, "decisions", "Calibrate /v1/decisions.", _KINDS)
