"""Forms with files, in pieces of any size."""

import pytest

from vllm.entrypoints.batch.multipart import FormParser, PartBegin, read_boundary
from vllm.exceptions import UserInputError

FORM = (
    b"--xyz\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz\r\n'
    b'content-disposition: form-data; name="file"; filename="a b.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
    b"one\r\n--xy\r\n-\r\n--\n\x00\xff\r\n--xyz\r\n"
    b'Content-Disposition: form-data; name="empty"\r\n\r\n\r\n--xyz--\r\nepilogue'
)
PARTS = [
    ("purpose", None, b"batch"),
    ("file", "a b.jsonl", b"one\r\n--xy\r\n-\r\n--\n\x00\xff"),
    ("empty", None, b""),
]


def parse(form: bytes, size: int) -> tuple[list[tuple[str, str | None, bytes]], bool]:
    parser = FormParser(b"xyz")
    parts: list[tuple[str, str | None, bytes]] = []
    for at in range(0, len(form), size):
        for event in parser.feed(form[at : at + size]):
            if isinstance(event, PartBegin):
                parts.append((event.name, event.filename, b""))
            else:
                name, filename, data = parts.pop()
                parts.append((name, filename, data + event.data))
    return parts, parser.is_complete


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_parts_are_found_in_pieces_of_any_size(size: int) -> None:
    assert parse(FORM, size) == (PARTS, True)


def test_a_form_that_breaks_off_is_not_complete() -> None:
    for end in range(len(FORM) - len(b"--\r\nepilogue")):
        assert not parse(FORM[:end], 5)[1]


def test_what_is_no_form() -> None:
    assert read_boundary('multipart/form-data; boundary="a b"') == b"a b"
    for wrong in ("application/json", "multipart/form-data", "multipart/form-data; boundary=", ""):
        with pytest.raises(UserInputError, match="multipart/form-data"):
            read_boundary(wrong)
    for form in (
        b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--",
        b"--xyz\r\n" + b"a" * 20_000,
        b"--xyz" + b"a" * 20_000,
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 70,
    ):
        with pytest.raises(UserInputError, match="form"):
            parse(form, 999)
