"""Where a picture's bytes come from: with the request, from a folder, or from another host."""

from __future__ import annotations

import base64
import binascii
import os
import stat
import urllib.parse
from dataclasses import dataclass

from vllm.exceptions import UserInputError
from vllm.multimodal.decode import MAX_FILE_BYTES

_DATA = "data:"
_FILE = "file:"
_WEB = ("http:", "https:")
# Base64 takes four characters for three bytes; lines may be broken.
_MAX_BASE64_CHARS = MAX_FILE_BYTES // 3 * 4 + MAX_FILE_BYTES // 16


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one picture's bytes lie, by kind; exactly one is given.

    Attributes:
        data: Base64 that came with the request.
        path: A file of this machine.
        address: An http(s) address.
    """

    data: str | None = None
    path: str | None = None
    address: str | None = None


def read_url(url: str) -> Origin:
    """Return where a URL says that a picture lies; nothing is decoded.

    Raises:
        UserInputError: It is of no kind that is known.
    """
    head = url[:8].lower()
    if head.startswith(_DATA):
        comma = url.find(",", 0, 1024)
        if comma < 0:
            raise UserInputError("is a data URL without a comma before its data", "messages")
        if not url[:comma].lower().endswith(";base64"):
            raise UserInputError(
                "is a data URL that is not base64: write data:image/png;base64, and then the data",
                "messages",
            )
        return Origin(data=url[comma + 1 :])
    if head.startswith(_FILE):
        parts = urllib.parse.urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise UserInputError("names a file of another machine", "messages")
        return Origin(path=urllib.parse.unquote(parts.path))
    if head.startswith(_WEB):
        return Origin(address=url)
    raise UserInputError(
        f"has the url {url[:32]!r}, which is none of data:image/...;base64,... , http://, https:// "
        "and file://",
        "messages",
    )


def decode_base64(text: str) -> bytes:
    """Return what base64 stands for.

    Raises:
        UserInputError: It is none, or too long.
    """
    if len(text) > _MAX_BASE64_CHARS:
        raise _too_many_bytes()
    if text[: len(_DATA)].lower() == _DATA:
        raise UserInputError(
            "has a data URL where base64 alone must stand: leave out what is before its comma, and "
            "the comma",
            "messages",
        )
    try:
        compact = text.translate(_WHITESPACE) if _has_whitespace(text) else text
        data = base64.b64decode(compact, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserInputError(f"is no valid base64 ({error})"[:160], "messages") from error
    if len(data) > MAX_FILE_BYTES:
        raise _too_many_bytes()
    return data


_WHITESPACE = {ord(char): None for char in " \t\r\n"}


def _has_whitespace(text: str) -> bool:
    return any(char in text for char in " \t\r\n")


def read_local_file(path: str, folder: str | None) -> bytes:
    """Return the bytes of a file under the folder that requests may name files of.

    Args:
        path: Of the file.
        folder: The folder; None: there is none.

    Raises:
        UserInputError: It may not be read, is no file, or is too large.
    """
    if not folder:
        raise UserInputError(
            "is a file of the server's machine, which is not read: send the picture itself "
            "(data:image/png;base64,...), or start the server with --allowed-local-media-path",
            "messages",
        )
    if "\0" in path:
        raise UserInputError("names a file with a NUL in its path", "messages")
    # One text for all: a client does not learn what else lies on this machine.
    refusal = UserInputError(
        "names no file under the folder of --allowed-local-media-path", "messages"
    )
    root = os.path.realpath(folder)
    try:
        # Without waiting for the other end of a pipe.
        descriptor = os.open(os.path.realpath(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise refusal from error
    try:
        # Where the opened file lies, whatever became of the links on the way meanwhile.
        opened = os.path.realpath(f"/proc/self/fd/{descriptor}")
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not opened.startswith(root.rstrip("/") + "/") or not is_file:
            raise refusal
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise refusal from error
    finally:
        os.close(descriptor)
    if len(data) > MAX_FILE_BYTES:
        raise _too_many_bytes()
    return data


def _too_many_bytes() -> UserInputError:
    return UserInputError(
        f"has more than the {MAX_FILE_BYTES >> 20} MiB that are read: send it smaller", "messages"
    )
