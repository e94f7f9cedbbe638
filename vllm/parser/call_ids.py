"""Ids of calls, as a family's prompts show them.

A conversation may have begun with another model, or another server's ids: a model that meets ids of
a form that it never learned ends its turn, and some templates refuse them.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.parser.offered import NAME_PATTERN

# A call's own id where it has the family's form, else one made of the given id, the function's name
# and the call's number in the conversation.
SpellId = Callable[[str, str, int], str]

_KIMI_ID = re.compile(rf"functions\.(?P<name>{NAME_PATTERN}):\d{{1,9}}")
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_MISTRAL_ID_CHARS = 9


def spell_kimi_id(name: str, number: int) -> str:
    """Return the id of a call as Kimi writes it: its number counts those of the chat."""
    return f"functions.{name}:{number}"


def is_kimi_id(call_id: str) -> bool:
    """Whether an id has the form of Kimi's own."""
    return _KIMI_ID.fullmatch(call_id) is not None


def _kimi_id(call_id: str, name: str, number: int) -> str:
    return call_id if is_kimi_id(call_id) else spell_kimi_id(name, number)


def _mistral_id(call_id: str, name: str, number: int) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_MISTRAL_ID_CHARS]


_SPELLINGS: Mapping[str, SpellId] = {
    "kimi_k2": _kimi_id,
    "mistral": _mistral_id,
    "mistral_v11": _mistral_id,
}


def with_own_ids(tools: str, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a chat whose calls, and their results, have ids of a family's own form.

    Args:
        tools: Name of the format of tool calls.
        messages: In the chat dialect; what is malformed stays, for others to refuse.
    """
    spell = _SPELLINGS.get(tools)
    if spell is None:
        return messages
    own: dict[str, str] = {}
    taken: set[str] = set()
    number = 0
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list):
            respelled = []
            for call in calls:
                respelled.append(_respell(call, spell, number, own, taken))
                number += 1
            message = {**message, "tool_calls": respelled}
        result_of = message.get("tool_call_id") if isinstance(message, Mapping) else None
        if isinstance(result_of, str):
            message = {**message, "tool_call_id": own.get(result_of, result_of)}
        changed.append(message)
    return changed


def _respell(call: Any, spell: SpellId, number: int, own: dict[str, str], taken: set[str]) -> Any:
    """One call with an id of its own form. Mutates: own, taken."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    call_id = call.get("id") if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not isinstance(call_id, str):
        return call
    spelled = spell(call_id, name, number)
    while spelled != call_id and spelled in taken:
        number += 1
        spelled = spell(f"{call_id} {number}", name, number)
    own[call_id] = spelled
    taken.add(spelled)
    return {**call, "id": spelled}
