"""``vllm complete``: have a running server continue texts."""

import argparse
import sys
from typing import Any

from vllm.entrypoints.cli.api_client import ApiClient, add_client_flags
from vllm.entrypoints.cli.conversation import print_answer, print_usage, read_lines
from vllm.utils.argparse_utils import human_int


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "complete",
        help="Have a running server continue texts.",
        description="Have a running server continue texts. Every line is one; an empty one or "
        "Ctrl-D ends.",
    )
    add_client_flags(parser)
    parser.add_argument(
        "--max-tokens", type=human_int, help="Tokens of an answer. Default: the server's, 16."
    )
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="Send one prompt and end.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Continue texts until the user ends; return the exit code.

    Raises:
        VllmError: The server cannot be reached, or refuses.
    """
    limit = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    with ApiClient.from_args(args) as client:
        if args.quick is None:
            print(f"Using model: {client.model}", file=sys.stderr)
        for prompt in read_lines("> ") if args.quick is None else [args.quick]:
            choices = client.stream("/completions", {"prompt": prompt, **limit})
            print_answer(choice["text"] for choice in choices)
            if args.stats:
                print_usage(client.usage)
    return 0
