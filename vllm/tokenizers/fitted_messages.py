"""Messages in the order that a chat template takes: what it would refuse or drop is joined.

    system, system, user                  system + system, user
    user, system, assistant               user + system, assistant
    assistant, system, user               assistant, system + user
    assistant, system, assistant          assistant, user (the system's text), assistant
    user, user                            user + user
    call, user, result, user              call, result + user + user

Texts that are joined stand in their order, a blank line between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm.tokenizers.chat_messages import ChatMessage, Part
from vllm.tokenizers.template_traits import TemplateTraits

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """A message, and which of the request's it holds.

    Attributes:
        message: To render.
        places: Of the request's messages, in their order.
    """

    message: ChatMessage
    places: tuple[int, ...]


def fit_messages(
    messages: Sequence[tuple[int, ChatMessage]], traits: TemplateTraits
) -> list[PlacedMessage]:
    """Return messages as a template takes them.

    Args:
        messages: With their places in the request.
        traits: Of the template.
    """
    fitted = [PlacedMessage(message, (place,)) for place, message in messages]
    fitted = _fit_first_systems(fitted, traits)
    if not traits.late_systems:
        fitted = _fit_late_systems(fitted)
    if not traits.lone_system and not any(p.message.role == "user" for p in fitted):
        fitted = [_as_user(p) if p.message.role == "system" else p for p in fitted]
    if not traits.user_before_result:
        order = put_results_first([placed.message for placed in fitted])
        fitted = [fitted[i] for i in order]
    if not traits.user_behind_result:
        fitted = _fit_beside_results(fitted)
    for role in ("user", "assistant"):
        if role not in traits.neighbours:
            fitted = _join_runs(fitted, role)
    return fitted


def put_results_first(messages: Sequence[ChatMessage]) -> list[int]:
    """Return the order in which results stand right behind their calls, before questions there."""
    order: list[int] = []
    waiting: list[int] = []
    is_behind_call = False
    for i, message in enumerate(messages):
        if is_behind_call and message.role == "user":
            waiting.append(i)
            continue
        if message.role != "tool":
            order += waiting
            waiting = []
            is_behind_call = bool(message.tool_calls)
        order.append(i)
    return order + waiting


def _num_leading_systems(messages: Sequence[PlacedMessage]) -> int:
    roles = [placed.message.role for placed in messages]
    return next((i for i, role in enumerate(roles) if role != "system"), len(roles))


def _fit_first_systems(
    messages: list[PlacedMessage], traits: TemplateTraits
) -> list[PlacedMessage]:
    """Join the system texts in front, and put them into the first question if need be."""
    count = _num_leading_systems(messages)
    first, rest = messages[:count], messages[count:]
    if not traits.several_systems or not traits.system:
        first = _join_runs(first, "system")
    if traits.system or not first:
        return [*first, *rest]
    user = _as_user(first[0])
    if rest and rest[0].message.role == "user":
        return [_join(user, rest[0]), *rest[1:]]
    return [user, *rest]


def _fit_late_systems(messages: list[PlacedMessage]) -> list[PlacedMessage]:
    """Make every system text behind a turn part of a question."""
    count = _num_leading_systems(messages)
    fitted = messages[:count]
    waiting: PlacedMessage | None = None
    for placed in messages[count:]:
        if placed.message.role == "system":
            user = _as_user(placed)
            if waiting is not None:
                waiting = _join(waiting, user)
            elif fitted[-1].message.role == "user":
                fitted[-1] = _join(fitted[-1], user)
            else:
                waiting = user
            continue
        if waiting is not None and placed.message.role == "user":
            placed = _join(waiting, placed)
        elif waiting is not None:
            fitted.append(waiting)
        waiting = None
        fitted.append(placed)
    return fitted if waiting is None else [*fitted, waiting]


def _fit_beside_results(messages: list[PlacedMessage]) -> list[PlacedMessage]:
    """Make questions behind results of calls part of these."""
    fitted: list[PlacedMessage] = []
    for placed in messages:
        if placed.message.role == "user" and fitted and fitted[-1].message.role == "tool":
            fitted[-1] = _join(fitted[-1], placed)
        else:
            fitted.append(placed)
    return fitted


def _join_runs(messages: Sequence[PlacedMessage], role: str) -> list[PlacedMessage]:
    """Join the messages of a role that follow each other."""
    fitted: list[PlacedMessage] = []
    for placed in messages:
        if fitted and fitted[-1].message.role == placed.message.role == role:
            fitted[-1] = _join(fitted[-1], placed)
        else:
            fitted.append(placed)
    return fitted


def _as_user(placed: PlacedMessage) -> PlacedMessage:
    return replace(placed, message=replace(placed.message, role="user"))


def _join_parts(one: ChatMessage, two: ChatMessage) -> tuple[Part, ...]:
    """Contents with pictures as one: a picture stays between the texts around it."""
    first = one.parts if one.parts is not None else (one.content,)
    second = two.parts if two.parts is not None else (two.content,)
    between = (_BETWEEN,) if one.content and two.content else ()
    return tuple(part for part in (*first, *between, *second) if part != "")


def _join(first: PlacedMessage, second: PlacedMessage) -> PlacedMessage:
    """Return one message of two: the first, longer."""
    one, two = first.message, second.message
    joined = replace(
        one,
        content=_BETWEEN.join(text for text in (one.content, two.content) if text),
        reasoning=_BETWEEN.join(text for text in (one.reasoning, two.reasoning) if text),
        tool_calls=(*one.tool_calls, *two.tool_calls),
        parts=_join_parts(one, two) if one.images or two.images else None,
    )
    return PlacedMessage(joined, (*first.places, *second.places))
