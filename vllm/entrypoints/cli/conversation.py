"""A terminal's side of a conversation: lines in, pieces of text out."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any


def read_lines(sign: str) -> Iterator[str]:
    """Yield lines until an empty one or the end of the input; Ctrl-C drops what was typed.

    Args:
        sign: Shown where the user may type; not where the input is a file.
    """
    shown = sign if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown)
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(an empty line or Ctrl-D ends)", file=sys.stderr)
            continue
        if not line:
            return
        yield line


def print_answer(pieces: Iterator[str], *, stops: bool) -> str:
    """Print pieces as they come, and a line's end; return what came.

    Args:
        pieces: Of an answer.
        stops: Whether Ctrl-C ends the answer alone: the server hears that nobody reads on.
    """
    whole = []
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            whole.append(piece)
    except KeyboardInterrupt:
        if not stops:
            raise
        print(" (stopped)", end="", file=sys.stderr)
    print()
    return "".join(whole)


def print_usage(usage: Mapping[str, Any] | None) -> None:
    """Print the token counts of an answer, apart from it."""
    if usage is None:
        return
    cached, prompt = find_cached(usage), usage["prompt_tokens"]
    share = f"{cached / prompt:.0%}" if prompt else "0%"
    print(
        f"[{prompt} prompt tokens, {cached} of them cached ({share}); "
        f"{usage['completion_tokens']} generated]",
        file=sys.stderr,
    )


def find_cached(usage: Mapping[str, Any]) -> int:
    """Return how many tokens of a prompt the server had; 0 where it does not say."""
    if "prompt_cache_hit_tokens" in usage:
        return int(usage["prompt_cache_hit_tokens"])
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
