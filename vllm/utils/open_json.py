"""Where JSON stands that was cut off: which part of it went on without an end."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "number", "list", "object", "nesting", "nothing"]
KINDS: tuple[Kind, ...] = ("text", "number", "list", "object", "nesting", "nothing")
# So many values within each other are the fault, whatever the innermost one holds.
_MANY_LEVELS = 16
_MAX_PATH_CHARS = 160
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*")
_TOKEN = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*+("?)|[{}\[\],:]|[^\s"{}\[\],:]+', re.DOTALL)
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


@dataclass(slots=True)
class _Open:
    """A list or an object that is written: where it begins, its entries, the key of the last."""

    is_list: bool
    begin: int
    num_entries: int = 0
    key: str = ""
    has_value: bool = False

    @property
    def takes_key(self) -> bool:
        """Whether a text that comes next is a key."""
        return not (self.is_list or self.has_value)


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
    opened: list[_Open] = []
    leaf: tuple[Kind, int] | None = None
    has_any = False
    for match in _TOKEN.finditer(text):
        token, leaf, has_any = match[0], None, True
        if token in "{[":
            _begin_value(opened)
            opened.append(_Open(token == "[", match.start()))
        elif token in "}]":
            opened[-1:] = []
        elif token == ",":
            if opened:
                opened[-1].has_value = False
        elif token == ":":
            continue
        elif token[0] == '"' and match[1]:
            if opened and opened[-1].takes_key:
                opened[-1].key = _unquote(token)
            _begin_value(opened)
        else:
            is_key = token[0] == '"' and bool(opened) and opened[-1].takes_key
            _begin_value(opened)
            kind: Kind = "text" if token[0] == '"' else "number"
            leaf = None if is_key else (kind, match.start())
    if not has_any:
        return OpenPart("nothing", "", 0)
    if not opened and (leaf is None or leaf[0] == "number"):
        return None
    return _find_largest(text, opened, leaf)


def _begin_value(opened: Sequence[_Open]) -> None:
    """Count an entry, where the innermost open value gets a new one."""
    if opened and not opened[-1].has_value:
        opened[-1].num_entries += 1
        opened[-1].has_value = True


def _find_largest(text: str, opened: Sequence[_Open], leaf: tuple[Kind, int] | None) -> OpenPart:
    half = len(text) / 2
    if leaf is not None and (len(text) - leaf[1] >= half or not opened):
        return OpenPart(leaf[0], _path(opened), len(text) - leaf[1])
    if len(opened) >= _MANY_LEVELS:
        return OpenPart("nesting", _path(opened), len(opened))
    depth = max((i for i, part in enumerate(opened) if len(text) - part.begin >= half), default=0)
    part = opened[depth]
    return OpenPart("list" if part.is_list else "object", _path(opened[:depth]), part.num_entries)


def _path(opened: Sequence[_Open]) -> str:
    path = "$"
    for part in opened:
        if part.is_list:
            path += f"[{max(0, part.num_entries - 1)}]"
        elif _PLAIN_KEY.fullmatch(part.key):
            path += f".{part.key}"
        else:
            path += f"[{json.dumps(part.key, ensure_ascii=False)}]"
    return show_place(path)


def _unquote(token: str) -> str:
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        return token[1:-1]
