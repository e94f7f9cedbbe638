"""Frames on a connection: a head that is checked before a byte behind it is believed.

| 4 magic | 1 kind | 3 - | 8 generation | 4 index | 4 length | 8 digest | 4 crc of these 32 |
| length bytes of payload                                                                  |

The digest of a payload is keyed by what it belongs to: lease, generation and place for rows. Rows
of another request, or of an earlier try, do not pass for those that were asked for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

from vllm.exceptions import EngineError

Buffer = bytes | bytearray | memoryview

_MAGIC = b"KVP1"
_HEAD = struct.Struct("!4sB3xQII8s")
HEAD_BYTES = _HEAD.size + 4
# Control frames; a region's length is known before its frame comes.
MAX_CONTROL_BYTES = 1 << 20


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1  # puller: who I am
    WELCOME = 2  # holder: who I am
    REFUSE = 3  # holder: we do not go together
    PULL = 4  # puller: send me these regions
    ROWS = 5  # holder: one region
    END = 6  # holder: that was all of them
    FAIL = 7  # holder: I cannot
    RELEASE = 8  # puller: I need the lease no more
    RELEASED = 9  # holder: it is free
    WRITTEN = 10  # holder: one region, which is in the puller's buffer


class FrameError(EngineError):
    """What came is no frame: the rest of the connection cannot be read."""


@dataclass(frozen=True, slots=True)
class Head:
    """A frame's head.

    Attributes:
        generation: Of the pull it belongs to; 0: none.
        index: Place of a region in the list that both sides worked out.
        length: Bytes of the payload.
        digest: Of the payload.
    """

    kind: Kind
    generation: int
    index: int
    length: int
    digest: bytes

    def pack(self) -> bytes:
        """Return its bytes."""
        head = _HEAD.pack(_MAGIC, self.kind, self.generation, self.index, self.length, self.digest)
        return head + zlib.crc32(head).to_bytes(4, "big")

    @classmethod
    def unpack(cls, data: Buffer) -> Head:
        """Read a head.

        Raises:
            FrameError: It is none, or was changed on its way.
        """
        raw = bytes(data)
        if len(raw) != HEAD_BYTES or zlib.crc32(raw[:-4]) != int.from_bytes(raw[-4:], "big"):
            raise FrameError("a frame's head does not match its checksum")
        magic, kind, generation, index, length, digest = _HEAD.unpack(raw[:-4])
        if magic != _MAGIC or kind not in Kind._value2member_map_:
            raise FrameError(f"a frame of kind {kind} begins with {magic!r}, not {_MAGIC!r}")
        if kind != Kind.ROWS and length > MAX_CONTROL_BYTES:
            raise FrameError(f"a control frame of {length} bytes is above {MAX_CONTROL_BYTES}")
        return cls(Kind(kind), generation, index, length, digest)


def digest_payload(key: bytes, payload: Iterable[Buffer]) -> bytes:
    """Return the digest of a payload in pieces, for the owner that ``key`` names."""
    digest = blake2b(key=blake2b(key, digest_size=16).digest(), digest_size=8)
    for piece in payload:
        digest.update(piece)
    return digest.digest()


def rows_key(lease: str, generation: int, index: int) -> bytes:
    """Return what the digest of a region's rows is keyed by."""
    return f"{lease}\0{generation}\0{index}".encode()


def control_key(kind: Kind) -> bytes:
    """Return what the digest of a control frame is keyed by."""
    return bytes((kind,))


def control_frame(kind: Kind, payload: bytes, generation: int = 0) -> tuple[bytes, bytes]:
    """Return head and payload of a control frame."""
    digest = digest_payload(control_key(kind), (payload,))
    return Head(kind, generation, 0, len(payload), digest).pack(), payload


def check_control(head: Head, payload: Buffer) -> bytes:
    """Return a control frame's payload.

    Raises:
        FrameError: It was changed on its way.
    """
    if head.digest != digest_payload(control_key(head.kind), (payload,)):
        raise FrameError(f"a {head.kind.name} frame does not match its checksum")
    return bytes(payload)
