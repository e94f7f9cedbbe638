"""``vllm decisions fit``: the temperature for a file of questions whose answers are known."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.api_client import ApiClient
from vllm.entrypoints.decisions.calibration import Fit, fit
from vllm.entrypoints.decisions.labelled_lines import read_labelled
from vllm.exceptions import ConfigError


def run_fit(args: argparse.Namespace) -> int:
    """Print what fits; return the exit code.

    Raises:
        ConfigError: The file is wrong or empty.
        VllmError: The server does not answer.
    """
    path: Path = args.file
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    with ApiClient.from_args(args) as client:

        def ask(body: Mapping[str, Any]) -> Mapping[str, Any]:
            return client.post("/decisions", body)

        questions = list(read_labelled(path, ask))
    if not questions:
        raise ConfigError(f"{path} holds no questions.")
    found = fit(questions)
    print(json.dumps(dataclasses.asdict(found)) if args.json else describe(found))
    return 0


def describe(found: Fit) -> str:
    """Return a fit in words."""
    rows = [("temperature 1", found.before), (f"temperature {found.temperature:.3f}", found.after)]
    if found.held_out is not None:
        rows.append(("the same, each half by the other", found.held_out))
    lines = [f"{found.num_questions} questions, {found.accuracy:.1%} answered right"]
    lines += [
        f"{name + ':':34} calibration error {one.error:.4f}, loss {one.loss:.4f}"
        for name, one in rows
    ]
    if found.is_bound:
        lines.append(
            "No temperature fits: the best one is at the end of the range. Are the labels right?"
        )
    lines.append(f"vllm serve ... --decision-temperature {found.temperature:.3f}")
    return "\n".join(lines)
