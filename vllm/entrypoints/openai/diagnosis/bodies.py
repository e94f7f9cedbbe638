"""What both APIs say of a comparison beyond the words of their own clients."""

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.diagnosis.comparison import Comparison


class FirstDifference(msgspec.Struct, frozen=True):
    """The first thing in which a request differs from an earlier one.

    Attributes:
        component: model, tools, tool_choice, system, messages, text_format, reasoning_effort,
            chat_template_kwargs or chat_format.
        token_offset: Of the first token that differs, in the new prompt.
        message_index: Of the message or item, as the API counts them; None: it is none.
    """

    component: str
    token_offset: int
    message_index: int | None


def describe_difference(found: Comparison | None) -> FirstDifference | UnsetType:
    """Return the first difference of a comparison, if it has one."""
    first = None if found is None else found.difference
    if first is None:
        return UNSET
    return FirstDifference(first.component, first.token_offset, first.message_index)
