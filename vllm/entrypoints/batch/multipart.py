"""Forms with files (``multipart/form-data``), read as they come: no file is whole in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vllm.exceptions import UserInputError

_MAX_PARTS = 64
_MAX_BOUNDARY = 70


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


def read_boundary(content_type: str) -> bytes:
    """Return the boundary that a ``Content-Type`` names.

    Raises:
        UserInputError: It is no form with files.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise UserInputError(
            f"Content-Type {content_type[:80]!r} is no form with a boundary: send the file as "
            "multipart/form-data.",
            "file",
        )
    return boundary


class FormParser:
    """Finds the parts of a form in bytes that come in any pieces.

    Owns: the library's parser, and what it found of the bytes that came last.

    Args:
        boundary: Between the parts.
    """

    def __init__(self, boundary: bytes) -> None:
        self._found: list[FormEvent] = []
        self._num_parts = 0
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._take_header,
                "on_header_value": self._take_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take_data,
                "on_end": self._end,
            },
        )

    @property
    def is_complete(self) -> bool:
        """Whether the last boundary has come."""
        return self._is_complete

    def feed(self, data: bytes) -> Iterator[FormEvent]:
        """Yield what bytes bring.

        Raises:
            UserInputError: They are no form.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise UserInputError(f"The form is broken: {error}", "file") from error
        yield from self._found
        self._found.clear()

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise UserInputError(f"The form has more than {_MAX_PARTS} parts.", "file")
        self._disposition = b""

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = (
            None if found is None else found.decode("utf-8", "replace")
            for found in (options.get(b"name"), options.get(b"filename"))
        )
        if not name:
            raise UserInputError("The form is broken: a part has no name.", "file")
        self._found.append(PartBegin(name, filename))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        self._found.append(PartData(data[start:end]))

    def _end(self) -> None:
        self._is_complete = True
