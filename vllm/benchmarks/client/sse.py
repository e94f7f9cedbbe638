"""Server-sent events out of bytes that come in any pieces."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its data, lines joined, and its name if it has one."""

    data: str
    name: str = ""


class EventDecoder:
    """Collects bytes until events are whole.

    Lines end with LF, CR LF or CR; a piece may end anywhere, inside a UTF-8 sequence or between CR
    and LF too. Comments are passed over.

    Owns: the bytes of the unfinished line, the lines of the unfinished event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._name = ""
        self._skips_line_feed = False

    def feed(self, piece: bytes) -> Iterator[Event]:
        """Yield the events that a piece completes."""
        for line in self._lines(piece):
            event = self._take(line.decode("utf-8", errors="replace"))
            if event is not None:
                yield event

    def _lines(self, piece: bytes) -> list[bytes]:
        if self._skips_line_feed and piece.startswith(b"\n"):
            piece = piece[1:]
        if piece:
            self._skips_line_feed = piece.endswith(b"\r")
        text = (self._rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        return lines

    def _take(self, line: str) -> Event | None:
        if not line:
            if not self._data:
                self._name = ""
                return None
            event = Event("\n".join(self._data), self._name)
            self._data, self._name = [], ""
            return event
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None
