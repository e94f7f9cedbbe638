"""The ``vllm`` command."""

import argparse
import sys
from collections.abc import Sequence

from vllm.entrypoints.cli import (
    bench,
    cache,
    chat,
    collect_env,
    complete,
    decisions,
    inspect,
    parse,
    render,
    run_batch,
    serve,
)
from vllm.exceptions import VllmError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import BANNER

_COMMANDS = (
    *(serve, chat, complete, decisions, inspect, parse, render, run_batch, bench, cache),
    collect_env,
)
_EXIT_USAGE = 2


def make_parser() -> FlexibleArgumentParser:
    """Return the parser of all commands."""
    parser = FlexibleArgumentParser(
        prog="vllm", description=BANNER, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--version", action="version", version=BANNER)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (2: a flag or the model is wrong)."""
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except VllmError as error:
        # Deliberate errors say what to do; a traceback would bury that.
        print(f"vllm {args.command}: error: {error}", file=sys.stderr)
        return _EXIT_USAGE if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
