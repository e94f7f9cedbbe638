"""Where JSON stands that was cut off: which part of it went on without an end.

Arrays of all characters say so: an answer may be long, and others wait while it is looked at.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["text", "number", "list", "object", "nesting", "nothing"]
KINDS: tuple[Kind, ...] = ("text", "number", "list", "object", "nesting", "nothing")
# So many values within each other are the fault, whatever the innermost one holds.
_MANY_LEVELS = 16
_MAX_PATH_CHARS = 160
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_TEXT = re.compile(r'\s*+("(?:[^"\\]|\\.)*+")', re.DOTALL)
_ANY = re.compile(r"\S")
_NO_NUMBER = re.compile(r'[\s"{}\[\],:]')
_ADVICE: dict[Kind, str] = {
    "text": "maxLength or a pattern in the schema bounds it",
    "number": "a minimum and a maximum in the schema bound it",
    "list": "maxItems in the schema bounds it",
    "object": "properties that are named, and no others, bound it",
    "nesting": "a schema that does not refer to itself bounds it",
    "nothing": "the answer had not begun",
}


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part of JSON that has no end.

    Attributes:
        kind: What it is; "nesting": values within each other; "nothing": there is no JSON yet.
        path: Where it stands, as ``$.items[3].name``.
        size: Characters of a text or number, entries of a list or object, levels of nesting.
    """

    kind: Kind
    path: str
    size: int

    def __str__(self) -> str:
        units = {"text": "characters", "number": "digits", "nesting": "levels"}
        if self.kind == "nothing":
            return _ADVICE["nothing"]
        unit = units.get(self.kind, "entries")
        name = "values within each other" if self.kind == "nesting" else f"the {self.kind}"
        return f"{name} at {self.path} ({self.size} {unit} so far): {_ADVICE[self.kind]}"

    @property
    def short(self) -> str:
        """What went on, and where, in a few words."""
        return f"unfinished {self.kind}" + (f" at {self.path}" if self.path else "")


@dataclass(frozen=True, slots=True)
class _Structure:
    """Where lists and objects of a text begin, that have no end, and what divides them.

    Attributes:
        text: All of it.
        opened: [L] Where they begin, outermost first.
        commas: [C] Where a comma stands that is no part of a text.
        depths: [C] How many are open at each.
        quote: Where a text begins that has no end; None: there is no such text.
    """

    text: str
    opened: npt.NDArray[np.intp]
    commas: npt.NDArray[np.intp]
    depths: npt.NDArray[np.int32]
    quote: int | None

    def is_list(self, level: int) -> bool:
        """Whether the one of a level, outermost 0, is a list."""
        return self.text[self.opened[level]] == "["

    def find_breaks(self, level: int) -> list[int]:
        """Return where its entries begin: behind its bracket, and behind each comma of its own."""
        begin = self.opened[level]
        commas = self.commas[np.searchsorted(self.commas, begin) :]
        own = commas[self.depths[-len(commas) :] == level + 1] if len(commas) else commas
        return [int(begin) + 1, *(own + 1).tolist()]

    def num_entries(self, level: int) -> int:
        """Return how many entries it has, the last one begun."""
        breaks = self.find_breaks(level)
        return len(breaks) - (_ANY.search(self.text, breaks[-1]) is None)

    def find_key(self, level: int) -> str:
        """Return an object's last key that is whole; "": there is none."""
        for begin in reversed(self.find_breaks(level)[-2:]):
            if found := _TEXT.match(self.text, begin):
                return _unquote(found[1])
        return ""

    def find_leaf(self) -> tuple[Kind, int] | None:
        """Return a text or number, and where it begins, if what was cut off ends with one."""
        if self.quote is not None:
            level = len(self.opened) - 1
            if level >= 0 and not self.is_list(level):
                begin = self.find_breaks(level)[-1]
                if not self.text[begin : self.quote].strip():
                    return None  # a key
            return "text", self.quote
        said = self.text.rstrip()
        found = _NO_NUMBER.search(said[::-1])
        begin = 0 if found is None else len(said) - found.start()
        return ("number", begin) if begin < len(said) else None


def show_place(place: str) -> str:
    """Return where a part stands, as one line of a log may have it: what clients write is in it."""
    place = "".join(c if c.isprintable() else repr(c)[1:-1] for c in place[: _MAX_PATH_CHARS + 1])
    return place if len(place) <= _MAX_PATH_CHARS else f"{place[:_MAX_PATH_CHARS]}…"


def find_open_part(text: str) -> OpenPart | None:
    """Return the part of JSON that went on: the innermost open one that holds half of all.

    Args:
        text: JSON that may have been cut off anywhere.

    Returns:
        None: the JSON is whole.
    """
    if _ANY.search(text) is None:
        return OpenPart("nothing", "", 0)
    structure = _read_structure(text)
    leaf = structure.find_leaf()
    if not len(structure.opened) and (leaf is None or leaf[0] == "number"):
        return None
    return _find_largest(structure, leaf)


def _read_structure(text: str) -> _Structure:
    plain = _ESCAPE.sub("  ", text)
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), np.uint32)
    quotes = codes == ord('"')
    is_outside = np.cumsum(quotes) % 2 == 0
    begins = is_outside & ((codes == ord("{")) | (codes == ord("[")))
    ends = is_outside & ((codes == ord("}")) | (codes == ord("]")))
    depths = np.cumsum(begins.astype(np.int32) - ends, dtype=np.int32)
    # What ends where nothing is open ends nothing.
    depths -= np.minimum(np.minimum.accumulate(depths), 0)
    least_from_here = np.minimum.accumulate(depths[::-1])[::-1]
    commas = np.flatnonzero(is_outside & (codes == ord(",")))
    return _Structure(
        text,
        opened=np.flatnonzero(begins & (least_from_here >= depths)),
        commas=commas,
        depths=depths[commas],
        quote=None if is_outside[-1] else int(np.flatnonzero(quotes)[-1]),
    )


def _find_largest(structure: _Structure, leaf: tuple[Kind, int] | None) -> OpenPart:
    length, opened = len(structure.text), structure.opened
    half = length / 2
    if leaf is not None and (length - leaf[1] >= half or not len(opened)):
        return OpenPart(leaf[0], _path(structure, len(opened)), length - leaf[1])
    if len(opened) >= _MANY_LEVELS:
        return OpenPart("nesting", _path(structure, len(opened)), len(opened))
    level = max(0, int(np.count_nonzero(length - opened >= half)) - 1)
    kind: Kind = "list" if structure.is_list(level) else "object"
    return OpenPart(kind, _path(structure, level), structure.num_entries(level))


def _path(structure: _Structure, num_levels: int) -> str:
    path = "$"
    for level in range(num_levels):
        if len(path) > _MAX_PATH_CHARS:
            break  # no more of it is shown
        if structure.is_list(level):
            path += f"[{max(0, structure.num_entries(level) - 1)}]"
            continue
        key = structure.find_key(level)
        path += (
            f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{json.dumps(key, ensure_ascii=False)}]"
        )
    return show_place(path)


def _unquote(token: str) -> str:
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        return token[1:-1]
