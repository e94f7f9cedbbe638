"""``vllm chat``: talk to a running server."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.entrypoints.cli.api_client import ApiClient, add_client_flags
from vllm.entrypoints.cli.conversation import print_answer, print_usage, read_lines

Message = dict[str, Any]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat",
        help="Talk to a running server.",
        description="Talk to a running server. Every line is a message; an empty one or Ctrl-D "
        "ends.",
    )
    add_client_flags(parser)
    parser.add_argument("--system-prompt", help="What the model is told before the first message.")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="Send one message and end.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends; return the exit code.

    Raises:
        VllmError: The server cannot be reached, or refuses.
    """
    messages: list[Message] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    with ApiClient.from_args(args) as client:
        if args.quick is not None:
            _take_turn(client, messages, args.quick)
            if args.stats:
                print_usage(client.usage)
            return 0
        print(f"Using model: {client.model}", file=sys.stderr)
        for line in read_lines("> "):
            _take_turn(client, messages, line)
            if args.stats:
                print_usage(client.usage)
    return 0


def _take_turn(client: ApiClient, messages: list[Message], text: str) -> None:
    """Send a message with all before it, print the answer, remember both."""
    messages.append({"role": "user", "content": text})
    answer = print_answer(_pieces(client.stream("/chat/completions", {"messages": messages})))
    messages.append({"role": "assistant", "content": answer})


def _pieces(choices: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is said; what is thought goes to stderr, so that nobody waits before nothing."""
    is_thinking = False
    for choice in choices:
        thought = choice["delta"].get("reasoning") or ""
        content = choice["delta"].get("content") or ""
        if thought:
            print(thought, end="", flush=True, file=sys.stderr)
            is_thinking = True
        if content and is_thinking:
            print(file=sys.stderr)
            is_thinking = False
        yield content
