"""Marks in chats: content parts up to which a prompt is worth keeping.

OpenAI's ``prompt_cache_breakpoint`` and Anthropic's ``cache_control``, which gateways pass on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.cache_hints import read_breakpoint_ttl
from vllm.exceptions import UserInputError
from vllm.inputs import MAX_CACHE_BOUNDARIES
from vllm.tokenizers.breakpoints import Breakpoint, read_cache_control


def find_marks(messages: Sequence[Mapping[str, Any]]) -> list[Breakpoint]:
    """Return the marks of a chat's content parts.

    Raises:
        UserInputError: One is malformed, or there are too many.
    """
    marks: list[Breakpoint] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, Mapping):
                continue  # refused where contents are read
            where = f"messages[{i}].content[{j}]"
            own, foreign = part.get("prompt_cache_breakpoint"), part.get("cache_control")
            if own is not None:
                ttl_s = read_breakpoint_ttl(own, f"{where}.prompt_cache_breakpoint", "messages")
                marks.append(Breakpoint(i, j, ttl_s))
            elif foreign is not None:
                marks.append(
                    Breakpoint(i, j, read_cache_control(foreign, f"{where}.cache_control"))
                )
    if len(marks) > MAX_CACHE_BOUNDARIES:
        raise UserInputError(
            f"messages hold {len(marks)} marks for the cache: at most {MAX_CACHE_BOUNDARIES}.",
            "messages",
        )
    return marks
