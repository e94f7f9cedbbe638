"""``diagnostics``: where a request's prompt parted from an earlier message's."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.diagnosis import comparison
from vllm.entrypoints.openai.diagnosis.bodies import FirstDifference, describe_difference
from vllm.entrypoints.openai.diagnosis.comparison import Comparison
from vllm.exceptions import UserInputError

_MAX_ID_CHARS = 256
_FIELD = "diagnostics"


class _Missed(msgspec.Struct, tag_field="type"):
    cache_missed_input_tokens: int


class ModelChanged(_Missed, tag="model_changed"):
    """Another model."""


class SystemChanged(_Missed, tag="system_changed"):
    """Another system prompt."""


class ToolsChanged(_Missed, tag="tools_changed"):
    """Other tools, or in another order."""


class MessagesChanged(_Missed, tag="messages_changed"):
    """An earlier message is another one."""


class PreviousMessageNotFound(msgspec.Struct, tag_field="type", tag="previous_message_not_found"):
    """Nothing is remembered of that message's request."""


class Unavailable(msgspec.Struct, tag_field="type", tag="unavailable"):
    """Something else differs, such as thinking or tool_choice."""


Reason = (
    ModelChanged
    | SystemChanged
    | ToolsChanged
    | MessagesChanged
    | PreviousMessageNotFound
    | Unavailable
)
_BY_COMPONENT: Mapping[str, type[ModelChanged | SystemChanged | ToolsChanged | MessagesChanged]] = {
    comparison.MODEL: ModelChanged,
    comparison.SYSTEM: SystemChanged,
    comparison.TOOLS: ToolsChanged,
    comparison.MESSAGES: MessagesChanged,
}


class Diagnostics(msgspec.Struct):
    """Of a message; the last field is there with ``--enable-prompt-tokens-details``."""

    cache_miss_reason: Reason
    first_difference: FirstDifference | UnsetType = UNSET


def read_diagnostics(value: Mapping[str, Any] | None) -> tuple[bool, str | None]:
    """Check ``diagnostics``; return whether it opts in, and the message to compare with.

    Raises:
        UserInputError: It is malformed.
    """
    if value is None:
        return False, None
    named = value.get("previous_message_id")
    is_id = isinstance(named, str) and 0 < len(named) <= _MAX_ID_CHARS
    if named is not None and not is_id:
        raise UserInputError(
            f"diagnostics.previous_message_id must be null, or an id of 1 to {_MAX_ID_CHARS} "
            f"characters, not {str(named)[:60]!r}.",
            _FIELD,
        )
    return True, named


def diagnose(
    found: Comparison | None, unit: int | None, *, shows_details: bool
) -> Diagnostics | None:
    """Return why a prompt parted from an earlier one; None: it goes on where that one ended.

    Args:
        found: The comparison; None: there is no such request.
        unit: Tokens that the cache shares at once; None: prefixes are not cached.
        shows_details: Whether to tell the first difference.
    """
    if found is None:
        return Diagnostics(PreviousMessageNotFound())
    first = found.difference
    if first is None or first.component == comparison.CHAT_FORMAT:
        return None
    kind = _BY_COMPONENT.get(first.component)
    missed = found.num_new - first.token_offset // (unit or 1) * (unit or 1)
    reason = Unavailable() if kind is None else kind(missed)
    return Diagnostics(reason, describe_difference(found) if shows_details else UNSET)
