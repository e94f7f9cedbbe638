"""A terminal's side of a conversation: lines in, pieces of text out."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def read_lines(sign: str) -> Iterator[str]:
    """Yield lines until an empty one or the end of the input.

    Args:
        sign: Shown where the user may type; not where the input is a file.
    """
    shown = sign if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown)
        except EOFError:
            return
        if not line:
            return
        yield line


def print_answer(pieces: Iterable[str]) -> str:
    """Print pieces as they come, and a line's end; return the whole."""
    whole = []
    for piece in pieces:
        print(piece, end="", flush=True)
        whole.append(piece)
    print()
    return "".join(whole)


def print_usage(usage: Mapping[str, Any] | None) -> None:
    """Print the token counts of an answer, apart from it."""
    if usage is None:
        return
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    print(
        f"[{usage['prompt_tokens']} prompt tokens, {cached} of them cached; "
        f"{usage['completion_tokens']} generated]",
        file=sys.stderr,
    )
