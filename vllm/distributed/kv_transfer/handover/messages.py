"""What control frames say, as msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from vllm.distributed.kv_transfer.handover.frames import FrameError


class Hello(msgspec.Struct, frozen=True):
    """Either side's introduction.

    Attributes:
        manifest: What both must have in common, by name.
        engine_id: Its name.
        instance: Its run.
    """

    manifest: dict[str, str]
    engine_id: str
    instance: str


class Refuse(msgspec.Struct, frozen=True):
    """Why the two do not go together, or a pull cannot be served.

    Attributes:
        is_final: Whether asking again is of no use.
    """

    reason: str
    is_final: bool = True


class Pull(msgspec.Struct, frozen=True):
    """Which regions of a lease to send.

    Attributes:
        num_tokens: Tokens of the prefix, as the puller knows it.
        dense_from: Dense rows below this token are not wanted.
        num_regions: How many regions follow from these numbers.
        wanted: Of those, ``[first, end)`` pairs.
        session: Where to write the rows instead of sending them, see ``direct``; empty: send them.
        address: Where there the first of them goes; the others follow.
    """

    lease: str
    num_tokens: int
    dense_from: int
    num_regions: int
    wanted: list[tuple[int, int]]
    session: str = ""
    address: int = 0


class Release(msgspec.Struct, frozen=True):
    """A lease that is needed no more."""

    lease: str


_Message = TypeVar("_Message", Hello, Refuse, Pull, Release)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Hello | Refuse | Pull | Release) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """Read a message.

    Raises:
        FrameError: It is no such message.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a {kind.__name__} message cannot be read: {error}") from error


def to_ranges(indices: list[int]) -> list[tuple[int, int]]:
    """Return ascending ints as ``[first, end)`` pairs."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
