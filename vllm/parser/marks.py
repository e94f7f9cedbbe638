"""Finding marks in a text that comes in parts."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# A text of many marks is cut off its beginning at each: so much of it at a time.
_PART_CHARS = 256


def parts_of(text: str) -> Iterator[str]:
    """Yield a text in parts of a length that costs little to cut: reading stays linear."""
    for at in range(0, len(text), _PART_CHARS):
        yield text[at : at + _PART_CHARS]


class Split(NamedTuple):
    """A text, cut at its first mark.

    Attributes:
        before: What stands before it and holds no part of a mark.
        mark: None: there is no whole one yet.
        rest: What follows the mark; without one, what may still become one.
    """

    before: str
    mark: str | None
    rest: str


class Marks:
    """Some texts that mean something to a format.

    The mark that begins first counts, so the result does not depend on how the text came; hence no
    mark may be the beginning of another.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(dict.fromkeys(marks))
        self._longest = max(map(len, self._marks), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self._beginnings = frozenset(
            mark[:length] for mark in self._marks for length in range(1, len(mark))
        )

    def split(self, text: str) -> Split:
        """Cut ``text`` at its first mark, or before what may become one."""
        found = self._pattern.search(text)
        end = len(text) if found is None else found.start()
        begin = len(text) - self._longest + 1
        for at in range(max(0, begin), end) if begin < end else ():
            if text[at:] in self._beginnings:
                return Split(text[:at], None, text[at:])
        if found is None:
            return Split(text, None, "")
        return Split(text[:end], found[0], text[found.end() :])


class JsonEnd:
    """Follows a JSON value from its first character to its last.

    What stands behind the last is nobody's.

    Owns: how deep the text so far is nested, and whether it ends inside a string.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_over = False

    @property
    def in_string(self) -> bool:
        """Whether what was read so far ends inside a string."""
        return self._in_string

    def find_end(self, text: str) -> int | None:
        """Read on; return how much of ``text`` belongs to the value if it ends there.

        Args:
            text: Follows what was read before; an object's or array's, first.
        """
        if self._is_over:
            return 0
        for match in re.finditer(r'["\\\[\]{}]|[^"\\\[\]{}]+', text):
            char = match[0] if len(match[0]) == 1 else ""
            if self._in_string:
                self._read_in_string(match[0])
            elif char == '"':
                self._in_string = True
            elif char and char in "[{":
                self._depth += 1
            elif char and char in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    self._is_over = True
                    return match.end()
        return None

    def _read_in_string(self, run: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif run == "\\":
            self._is_escaped = True
        elif run == '"':
            self._in_string = False
