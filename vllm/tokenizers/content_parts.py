"""Whether a chat template writes the parts of a message itself, or wants one text."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UserInputError


@dataclass(frozen=True, slots=True)
class PartRoles:
    """In which form a template takes contents.

    Attributes:
        takes: Roles whose contents it takes as lists of parts.
        needs: Those of them whose contents it takes as nothing else.
    """

    takes: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()


_PROBE = "partprobe"
_PARTS = [{"type": "text", "text": _PROBE}]
_TEXT_PARTS = [{"type": "text", "text": "a"}]
_ROLES = ("system", "user", "assistant", "tool")
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
) -> PartRoles:
    """Return the roles whose contents the template takes, or needs, as lists of parts.

    It is tried: a template that takes parts shows the text of one and nothing of its shape. One
    that wants texts shows neither, prints the list as it is, or fails.

    Args:
        render: Renders messages; raises UserInputError where the template fails.
    """
    takes = frozenset(
        role
        for role in _ROLES
        if any(_PROBE in _unquoted(render, _chat(role, _PARTS, also)) for also in ((), _ROLES))
    )
    needs = frozenset(r for r in takes if _PROBE not in _render(render, _chat(r, _PROBE, takes)))
    return PartRoles(takes, needs)


def find_image_roles(
    render: Callable[[Sequence[Mapping[str, Any]]], str], marker: str
) -> frozenset[str]:
    """Return the roles in whose messages the template shows pictures.

    Args:
        render: As of ``find_part_roles``.
        marker: What it writes for a picture.
    """
    picture = [{"type": "image"}, *_PARTS]

    def shows(role: str) -> bool:
        shown = (_render(render, _chat(role, picture, also)) for also in ((), _ROLES))
        return any(text.count(marker) == 1 and _PROBE in text for text in shown)

    return frozenset(filter(shows, _ROLES))


def _chat(role: str, content: Any, parts_of: Collection[str] = ()) -> Sequence[Mapping[str, Any]]:
    """A chat that holds what is tried; its other contents are parts of ``parts_of``."""
    user = {"role": "user", "content": _TEXT_PARTS if "user" in parts_of else "a"}
    call = {**_CALL, "content": [] if "assistant" in parts_of else ""}
    tried = {"role": role, "content": content}
    if role == "system":
        return [tried, user]
    if role == "assistant":
        return [user, tried, user]
    if role == "tool":
        return [user, call, {**tried, "tool_call_id": "call00000", "name": "f"}]
    return [tried]


def _render(
    render: Callable[[Sequence[Mapping[str, Any]]], str], chat: Sequence[Mapping[str, Any]]
) -> str:
    try:
        return render(chat)
    except UserInputError:
        return ""


def _unquoted(
    render: Callable[[Sequence[Mapping[str, Any]]], str], chat: Sequence[Mapping[str, Any]]
) -> str:
    """What is shown, unless a list is printed as it is: its texts stand in quotation marks."""
    shown = _render(render, chat)
    quoted = any(f"{mark}{_PROBE}{mark}" in shown for mark in ("'", '"', "\\'", '\\"'))
    return "" if quoted else shown
