"""The ``vllm`` command."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm.exceptions import VllmError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import BANNER

# Modules of this folder, each of which adds its parser. Where one is named, no other is loaded.
_COMMANDS = {
    name: name.replace("-", "_")
    for name in (
        *("serve", "chat", "complete", "decisions", "inspect", "parse", "render", "run-batch"),
        *("bench", "cache", "collect-env"),
    )
}
_EXIT_USAGE = 2


def make_parser(command: str | None = None) -> FlexibleArgumentParser:
    """Return the parser of all commands, or of one alone."""
    parser = FlexibleArgumentParser(
        prog="vllm", description=BANNER, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--version", action="version", version=BANNER)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = None if command is None else _COMMANDS.get(command)
    for module in _COMMANDS.values() if named is None else (named,):
        import_module(f"vllm.entrypoints.cli.{module}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (2: a flag or the model is wrong)."""
    words = sys.argv[1:] if argv is None else argv
    args = make_parser(words[0] if words else None).parse_args(words)
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
