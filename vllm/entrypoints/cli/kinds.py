"""Commands of a command: ``vllm bench serve``, ``vllm cache simulate``."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser


@dataclass(frozen=True, slots=True)
class Kind:
    """One command below another.

    Attributes:
        name: On the command line.
        text: What it does.
        add_flags: Adds its flags.
        run: "module:function" under ``vllm``, loaded when it runs: --help must not wait
            for clients and engines.
    """

    name: str
    text: str
    add_flags: Callable[[FlexibleArgumentParser], None]
    run: str


def add_kinds(commands: Any, name: str, text: str, kinds: Sequence[Kind]) -> None:
    """Add a command with commands of its own."""
    parser = commands.add_parser(name, help=text, description=text)
    below = parser.add_subparsers(dest=f"{name}_command", metavar="WHAT", required=True)
    for kind in kinds:
        own = below.add_parser(kind.name, help=kind.text, description=kind.text)
        kind.add_flags(own)
        own.set_defaults(run=partial(_run, kind.run))


def _run(place: str, args: argparse.Namespace) -> int:
    module, _, function = place.partition(":")
    code: int = getattr(importlib.import_module(f"vllm.{module}"), function)(args)
    return code
