"""Rows that do not pass through the connection: an engine writes them into the other's memory.

    puller   offers a buffer: (session, address); asks for as many regions as fit
    holder   writes a region there, then says so in a frame that carries the rows' digest
    puller   takes the bytes out of the buffer, checks them, and puts them where the model reads

The holder never writes into the puller's pool. A write that comes late, its load given up,
spoils the buffer at most, and what is spoilt there does not match its digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm.distributed.kv_transfer.handover.frames import Buffer


class RowWriter(Protocol):
    """The holder's way into other engines' memory."""

    def write(self, session: str, address: int, pieces: Sequence[Buffer]) -> None:
        """Write pieces one behind the other; returns when they are there.

        Args:
            session: What the other engine calls its memory.
            address: Where the first one goes.
            pieces: Of this engine's registered memory.

        Raises:
            FrameError: They cannot be written.
        """


class RowSink(Protocol):
    """The puller's buffer, into which holders write."""

    @property
    def session(self) -> str:
        """What it is called."""

    @property
    def address(self) -> int:
        """Where it begins."""

    @property
    def capacity(self) -> int:
        """Its bytes."""

    def read(self, offset: int, length: int) -> bytes:
        """Return a copy of what is there now."""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """How rows travel beside the connection.

    Attributes:
        name: Of the transport; engines that differ do not go together.
        writer: For those who hold.
        sink: For those who pull.
    """

    name: str
    writer: RowWriter
    sink: RowSink
