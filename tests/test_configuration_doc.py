"""docs/configuration.md lists exactly the flags and variables there are."""

import argparse
import re

from tools.options_doc import PAGE, render
from vllm import envs
from vllm.entrypoints.cli.main import make_parser

DOC = PAGE.read_text("utf-8")


def serve_flags() -> set[str]:
    commands = next(
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    flags = set()
    for action in commands.choices["serve"]._actions:
        if action.help != argparse.SUPPRESS:
            flags |= {name for name in action.option_strings if name.startswith("--")}
    return flags - {"--help"}


def test_every_flag_is_described_and_no_other() -> None:
    rows = [line for line in DOC.splitlines() if line.startswith("| `--")]
    assert {flag for row in rows for flag in re.findall(r"`(--[\w-]+)`", row.split("|")[1])} == (
        serve_flags()
    )


def test_every_variable_is_described_and_no_other() -> None:
    described = set(re.findall(r"^\| `([A-Z_0-9]+)` \|", DOC, flags=re.MULTILINE))
    assert described == set(dir(envs))


def test_the_tables_are_what_the_options_say() -> None:
    assert render(DOC) == DOC, "run python -m tools.options_doc"
    assert "| `--port` | `8000` |" in render("<!-- options: server -->\n<!-- end -->\n")
