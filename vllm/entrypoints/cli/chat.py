"""``vllm chat``: talk to a running server."""

import argparse
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from vllm.entrypoints.cli.api_client import (
    ApiClient,
    add_client_flags,
    add_sampling_flags,
    sampling_of,
)
from vllm.entrypoints.cli.conversation import print_answer, print_usage, read_lines

Message = dict[str, Any]
_MAX_TOKENS = 2048


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "chat",
        help="Talk to a running server.",
        description="Talk to a running server. Every line is a message; an empty one or Ctrl-D "
        "ends, Ctrl-C ends an answer.",
    )
    add_client_flags(parser)
    add_sampling_flags(parser, _MAX_TOKENS)
    parser.add_argument(
        "--system-prompt", "--system", help="What the model is told before the first message."
    )
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
        talk = _Talk(client, messages, sampling_of(args, client))
        if args.quick is not None:
            talk.take_turn(args.quick, stops=False)
            if args.stats:
                print_usage(client.usage)
            return 0
        print(f"Using model: {client.model}", file=sys.stderr)
        for line in read_lines("> "):
            talk.take_turn(line, stops=True)
            if args.stats is not False:
                print_usage(client.usage)
    return 0


class _Talk:
    """One conversation.

    Owns: its messages.
    """

    def __init__(
        self, client: ApiClient, messages: list[Message], sampling: Mapping[str, Any]
    ) -> None:
        self._client, self._messages, self._sampling = client, messages, sampling

    def take_turn(self, text: str, *, stops: bool) -> None:
        """Send a message with all before it, print the answer, remember both."""
        self._messages.append({"role": "user", "content": text})
        body = {"messages": self._messages, **self._sampling}
        with closing(_pieces(self._client.stream("/chat/completions", body))) as pieces:
            answer = print_answer(pieces, stops=stops)
        self._messages.append({"role": "assistant", "content": answer})


def _pieces(choices: Iterator[Mapping[str, Any]]) -> Generator[str]:
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
