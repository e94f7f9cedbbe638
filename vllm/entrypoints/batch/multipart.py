"""Forms with files (``multipart/form-data``, RFC 7578), read as they come: a file is never whole
in memory.

    --boundary CRLF headers CRLF CRLF body CRLF --boundary ... CRLF --boundary-- CRLF
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from enum import Enum, auto

from vllm.exceptions import UserInputError

_MAX_HEADER_BYTES = 16 * 1024
_MAX_PARTS = 64
_BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,./:=? -]{1,70}")


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins.

    Attributes:
        name: Of the form's field.
        filename: Of a file; None: the part is a plain value.
    """

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """Bytes of the part that began last."""

    data: bytes


FormEvent = PartBegin | PartData


class _Stage(Enum):
    PREAMBLE = auto()
    HEADERS = auto()
    BODY = auto()
    END = auto()


def read_boundary(content_type: str) -> bytes:
    """Return the boundary that a ``Content-Type`` names.

    Raises:
        UserInputError: It is no form with files.
    """
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_param("boundary")
    is_form = message.get_content_type() == "multipart/form-data"
    if not is_form or not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise UserInputError(
            f"Content-Type {content_type[:80]!r} is no form with a boundary: send the file as "
            "multipart/form-data.",
            "file",
        )
    return boundary.encode()


class FormParser:
    """Finds the parts of a form in bytes that come in any pieces.

    Owns: what is not yet sure to be no boundary.

    Args:
        boundary: Between the parts.
    """

    def __init__(self, boundary: bytes) -> None:
        # The first boundary has no line before it.
        self._delimiter = b"\r\n--" + boundary
        self._waiting = bytearray(b"\r\n")
        self._stage = _Stage.PREAMBLE
        self._num_parts = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last boundary has come."""
        return self._stage is _Stage.END

    def feed(self, data: bytes) -> Iterator[FormEvent]:
        """Yield what bytes bring.

        Raises:
            UserInputError: They are no form.
        """
        self._waiting += data
        while self._stage is not _Stage.END:
            if self._stage is _Stage.HEADERS:
                begin = self._take_headers()
                if begin is None:
                    return
                yield begin
                continue
            body, has_ended = self._take_body()
            if body and self._stage is _Stage.BODY:
                yield PartData(body)
            if not has_ended or not self._pass_boundary():
                return

    def _take_body(self) -> tuple[bytes, bool]:
        """Bytes up to the next boundary, or those that are surely none; and whether it came."""
        at = self._waiting.find(self._delimiter)
        end = at if at >= 0 else max(0, len(self._waiting) - len(self._delimiter) + 1)
        body = bytes(self._waiting[:end])
        del self._waiting[:end]
        return body, at >= 0

    def _pass_boundary(self) -> bool:
        """Pass a boundary that stands in front; False: more bytes must come to see its kind."""
        size = len(self._delimiter)
        behind = self._waiting[size : size + 2]
        if len(behind) < 2:
            return False
        if behind == b"--":
            self._stage = _Stage.END
            self._waiting.clear()
            return True
        line_end = self._waiting.find(b"\r\n", size)
        if line_end < 0:
            if len(self._waiting) > size + _MAX_HEADER_BYTES:
                raise UserInputError("The form is broken: a boundary's line has no end.", "file")
            return False
        del self._waiting[: line_end + 2]
        self._stage = _Stage.HEADERS
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise UserInputError(f"The form has more than {_MAX_PARTS} parts.", "file")
        return True

    def _take_headers(self) -> PartBegin | None:
        end = self._waiting.find(b"\r\n\r\n")
        if end < 0:
            if len(self._waiting) > _MAX_HEADER_BYTES:
                raise UserInputError("The form is broken: headers of a part have no end.", "file")
            return None
        raw = bytes(self._waiting[:end])
        del self._waiting[: end + 4]
        self._stage = _Stage.BODY
        return _read_begin(raw)


def _read_begin(raw: bytes) -> PartBegin:
    headers = raw.decode("utf-8", "replace").split("\r\n")
    named = next(
        (
            value
            for name, _, value in (line.partition(":") for line in headers)
            if name.strip().lower() == "content-disposition"
        ),
        "",
    )
    message = Message()
    message["Content-Disposition"] = named.strip()
    name = message.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise UserInputError("The form is broken: a part has no name.", "file")
    filename = message.get_filename()
    return PartBegin(name, filename)
