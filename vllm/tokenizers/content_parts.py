"""Whether a chat template writes the parts of a message itself, or wants one text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.exceptions import UserInputError

_PROBE = "partprobe"
_USER = {"role": "user", "content": "a"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "f", "arguments": {}},
        }
    ],
}


def find_part_roles(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
) -> frozenset[str]:
    """Return the roles whose contents the template takes as lists of parts.

    It is tried: a template that takes parts shows the text of one and nothing of its shape. One
    that wants texts shows neither, prints the list as it is, or fails.

    Args:
        render: Renders messages; raises UserInputError where the template fails.
    """
    chats: dict[str, list[Mapping[str, Any]]] = {
        "system": [_with_parts("system"), _USER],
        "user": [_with_parts("user")],
        "assistant": [_USER, _with_parts("assistant"), _USER],
        "tool": [_USER, _CALL, {**_with_parts("tool"), "tool_call_id": "call00000", "name": "f"}],
    }
    return frozenset(role for role, chat in chats.items() if _takes_parts(render, chat))


def _with_parts(role: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": _PROBE}]}


def _takes_parts(
    render: Callable[[Sequence[Mapping[str, Any]]], str], chat: Sequence[Mapping[str, Any]]
) -> bool:
    try:
        shown = render(chat)
    except UserInputError:
        return False
    # Printed as it is, the part's text stands in quotation marks.
    quoted = any(f"{mark}{_PROBE}{mark}" in shown for mark in ("'", '"', "\\'", '\\"'))
    return _PROBE in shown and not quoted
