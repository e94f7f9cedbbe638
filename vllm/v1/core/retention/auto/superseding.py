"""When a conversation gives up where it began before: the words for it."""

from enum import Enum


class Superseding(Enum):
    """When a checkpoint goes first because its conversation has one further on.

    Each is right for some traffic: AT_ONCE where conversations only go on, A_TURN_LATER where the
    last turn is edited or answered again, NEVER where people return to earlier turns.
    """

    AT_ONCE = "at_once"
    A_TURN_LATER = "a_turn_later"
    NEVER = "never"
