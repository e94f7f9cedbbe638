"""``vllm complete``: have a running server continue texts."""

import argparse
import sys
from contextlib import closing
from typing import Any

from vllm.entrypoints.cli.api_client import (
    ApiClient,
    add_client_flags,
    add_sampling_flags,
    sampling_of,
)
from vllm.entrypoints.cli.conversation import print_answer, print_usage, read_lines

_MAX_TOKENS = 128


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "complete",
        help="Have a running server continue texts.",
        description="Have a running server continue texts. Every line is one; an empty one or "
        "Ctrl-D ends, Ctrl-C ends an answer.",
    )
    add_client_flags(parser)
    add_sampling_flags(parser, _MAX_TOKENS)
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="Send one prompt and end.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Continue texts until the user ends; return the exit code.

    Raises:
        VllmError: The server cannot be reached, or refuses.
    """
    with ApiClient.from_args(args) as client:
        sampling, is_talk = sampling_of(args, client), args.quick is None
        if is_talk:
            print(f"Using model: {client.model}", file=sys.stderr)
        for prompt in read_lines("> ") if is_talk else [args.quick]:
            choices = client.stream("/completions", {"prompt": prompt, **sampling})
            with closing(choice["text"] for choice in choices) as pieces:
                print_answer(pieces, stops=is_talk)
            if args.stats or (is_talk and args.stats is not False):
                print_usage(client.usage)
    return 0
