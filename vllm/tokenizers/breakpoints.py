"""Marked places of a chat, such as ``cache_control`` of the Messages API, as token offsets.

A place in a message is found in any chat format by altering what follows it and encoding again: the
tokens that both prompts begin with are those that a later prompt can share.

    prompt     <system> You are ... |mark| Today is Sunday. <user> Hi <assistant>
    altered    <system> You are ... |mark| @                <user> @  <assistant>
    shared     ------------------------->
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UserInputError
from vllm.tokenizers.chat_messages import ChatEncoder, ChatOptions, ChatPrompt

# What follows a place is replaced by this; a text that goes on like it shares a token more.
_OTHER_TEXT = "\u241e"
_TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A place in a chat up to which its prompt is worth keeping.

    Attributes:
        message_index: The message that it is in, or that it ends.
        part_index: The last part before it of a content that is a list; None: the whole message.
        ttl_s: For how many seconds to keep the prefix at least, as far as the cap on pins allows;
            None: as long as others.
    """

    message_index: int
    part_index: int | None = None
    ttl_s: float | None = None


def read_cache_control(value: Any, name: str) -> float | None:
    """Return the ``ttl_s`` of a content block's ``cache_control`` field.

    Args:
        value: The field, not None.
        name: What to call it in an error, such as ``messages[1].content[0].cache_control``.

    Raises:
        UserInputError: It is malformed, or its type or time to live is unknown.
    """
    if not isinstance(value, Mapping) or value.get("type") != "ephemeral":
        raise UserInputError(
            f'{name} must be an object of type "ephemeral", not {str(value)[:60]!r}.', name
        )
    ttl = value.get("ttl")
    if ttl is None:
        return None
    if not isinstance(ttl, str) or ttl not in _TTL_S:
        raise UserInputError(
            f"{name}.ttl={ttl!r} is unknown: use one of {', '.join(_TTL_S)}, or leave it out.", name
        )
    return _TTL_S[ttl]


def find_breakpoints(
    encoder: ChatEncoder,
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    prompt: ChatPrompt,
    breakpoints: Iterable[Breakpoint],
) -> dict[int, float | None]:
    """Return where breakpoints stand in a prompt: token offset to ``ttl_s``, the longer of two.

    A place that the chat format does not show is left out. Costs an encoding of the chat up to the
    place for each, so call it in the thread that encoded the chat.

    Args:
        encoder: That made the prompt.
        messages: As they were encoded.
        options: As they were encoded with.
        prompt: What came out.
        breakpoints: In any order.
    """
    found: dict[int, float | None] = {}
    for place in breakpoints:
        altered = _alter_behind(messages, place)
        if altered is None:
            offset = len(prompt.token_ids)
        else:
            try:
                other = encoder.encode_chat(altered, options)
            except UserInputError:
                # The chat itself was encoded: it is our text that this format does not take.
                continue
            offset = _num_shared(prompt.token_ids, other.token_ids)
        if offset:
            found[offset] = max(filter(None, (found.get(offset), place.ttl_s)), default=None)
    return found


def _alter_behind(
    messages: Sequence[Mapping[str, Any]], place: Breakpoint
) -> list[Mapping[str, Any]] | None:
    """Return messages that are equal up to a place; None if nothing follows it."""
    index, part = place.message_index, place.part_index
    altered = list(messages[: index + 1])
    content = altered[index].get("content")
    if part is not None and isinstance(content, list) and part + 1 < len(content):
        parts = [*content[: part + 1], {"type": "text", "text": _OTHER_TEXT}]
        altered[index] = {**altered[index], "content": parts}
    elif index + 1 == len(messages):
        return None
    # The roles stay: formats write early messages by what comes later.
    return altered + [{**message, "content": _OTHER_TEXT} for message in messages[index + 1 :]]


def _num_shared(token_ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(token_ids, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(token_ids), len(others)))
