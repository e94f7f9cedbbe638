"""The line about billing that Claude Code puts in front of a system prompt.

    x-anthropic-billing-header: cc_version=2.1.332.1ab; cc_entrypoint=cli; cch=a1b2c;

Two of its values change with each request, so nothing behind it would ever be found in the prefix
cache; it is no text for the model.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from vllm.tokenizers.chat_messages import ChatMessage, join_texts

_PAIR = r"[A-Za-z][\w.-]*=[^\s;]*"
# The name, then pairs, each with a semicolon but for one that ends its line, then one line break.
_LINE = re.compile(
    rf"x-anthropic-billing-header:"
    rf"(?:[ \t]*{_PAIR};)*(?:[ \t]*{_PAIR}(?=[ \t]*(?:\r?\n|\Z)))?"
    r"(?:[ \t]*(?:\r?\n|\Z))?",
    re.IGNORECASE,
)


def strip_billing_line(text: str) -> str:
    """Return a system text without the line at its very beginning, the rest as it is."""
    match = _LINE.match(text)
    return text if match is None else text[match.end() :]


def leave_out_billing_line(
    messages: Iterable[tuple[int, ChatMessage]], keeps: bool = False
) -> tuple[list[tuple[int, ChatMessage]], bool]:
    """Take the line out of the first system text of a chat; other texts are not touched.

    Args:
        messages: With their places in the request.
        keeps: Whether to leave it in.

    Returns:
        The messages, without one that holds nothing else, and whether a line was left out.
    """
    kept = list(messages)
    if keeps:
        return kept, False
    for at, (place, message) in enumerate(kept):
        if message.role == "system":
            stripped = _strip(message)
            if stripped is None:
                break
            has_text = bool(stripped.content) or len(kept) == 1
            kept[at : at + 1] = [(place, stripped)] if has_text else []
            return kept, True
    return kept, False


def _strip(message: ChatMessage) -> ChatMessage | None:
    """Return a system message without the line; None: it has none."""
    if message.parts is None:
        text = strip_billing_line(message.content)
        return None if text == message.content else replace(message, content=text)
    first = next((i for i, part in enumerate(message.parts) if part), None)
    if first is None:
        return None
    part = message.parts[first]
    if not isinstance(part, str):
        return None
    text = strip_billing_line(part)
    if text == part:
        return None
    parts = (*message.parts[:first], *([text] if text else []), *message.parts[first + 1 :])
    return replace(message, content=join_texts(parts), parts=parts)
