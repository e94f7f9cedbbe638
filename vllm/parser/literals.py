"""Values as models write them, told as JSON while they are read.

What is JSON stays as it is spelled. Beside it stands what is as plain: Python's quotes, constants,
tuples and escapes, commas at the end, line breaks in texts, and, where a format has them, keys and
words without quotes and quotes of the format's own.

                    key              colon              value
    { ---> KEY ------------> COLON ---------> VALUE -------------> COMMA ---> KEY
    [ ---> VALUE -------------------------------------> COMMA ---> VALUE
    } ] and the last of all ---> OVER
"""

import json
import re
from enum import Enum, auto
from typing import Protocol

CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_JSON_WORDS = ("true", "false", "null")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_PYTHON_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_SPACE = re.compile(r"[ \t\r\n]*")
_KEY_NAME = re.compile(r"[A-Za-z_$][\w$.-]*")
_WORD = re.compile(r"[^ \t\r\n,:\[\]{}()\"'=]+")
_LOOSE_WORD = re.compile(r"[^,:\[\]{}()\"'=]+")
_LOOSE_VALUE = re.compile(r"[^,\[\]{}()\"']+")
_PLAIN = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"[^'\"\\\x00-\x1f]+"),
}
_JSON_ESCAPES = frozenset('"\\/bfnrt')
# Not those of bells and the like: what stands there is a path.
_PYTHON_ESCAPES = {"'": "'", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_MAX_DEPTH = 256


class ValueSchema(Protocol):
    """What a schema says of values whose words stand without quotes."""

    @property
    def is_open(self) -> bool:
        """Whether it does not say which types values have."""

    @property
    def item(self) -> "ValueSchema":
        """The schema of an array's items."""

    def field(self, key: str) -> "ValueSchema":
        """Return the schema of an object's member."""

    def read(self, text: str) -> str | None:
        """Return the JSON of what a word means; None: it can be no value."""


class _Expects(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    OVER = auto()


class LiteralStream:
    """Reads one value.

    Owns: what is open around the text so far, and what of that waits to be told.

    Args:
        loose: Whether keys and words may stand without quotes, as Gemma's do; what such a word
            means its schema says.
        schema: Of the value; None: nothing is known of it.
        in_parentheses: Whether an object may stand in parentheses.
    """

    def __init__(
        self,
        *,
        loose: bool = False,
        schema: ValueSchema | None = None,
        in_parentheses: bool = False,
    ) -> None:
        self._loose = loose
        self._in_parentheses = in_parentheses
        self._expects = _Expects.VALUE
        self._open: list[str] = []
        self._schemas: list[ValueSchema | None] = [schema]
        self._is_single: list[bool] = []
        self._quote = ""
        self._escape = ""
        self._word: list[str] = []
        # A comma and the space behind it: they are told before what follows them.
        self._comma = ""
        self._key = ""
        self._fault = ""
        self._is_key = False

    @property
    def is_over(self) -> bool:
        """Whether the value is whole."""
        return self._expects is _Expects.OVER

    @property
    def fault(self) -> str:
        """Why the text is no value; empty: it may be one."""
        return self._fault

    @property
    def in_text(self) -> bool:
        """Whether what was read so far ends inside a text."""
        return bool(self._quote)

    def add(self, text: str) -> tuple[str, int]:
        """Read on.

        Returns:
            The JSON of what is new, and how much of ``text`` belongs to the value.
        """
        out: list[str] = []
        at = 0
        while at < len(text) and not self.is_over and not self._fault:
            if self._quote:
                at = self._read_text(text, at, out)
            else:
                at = self._read_between(text, at, out)
        return "".join(out), at

    def finish(self) -> str:
        """Take in the end of the text; return the rest of the JSON."""
        out: list[str] = []
        self._end_word(out)
        return "".join(out)

    def toggle_quote(self, mark: str) -> str:
        """Take in a quote of the format's own; return the JSON of it."""
        out: list[str] = []
        if self.is_over or self._fault:
            return ""
        if self._quote == mark:
            self._end_text(out)
        elif self._quote:
            # Inside other quotes it is text.
            out.append(_escape(mark))
            self._note_key(mark)
        elif "".join(self._word).strip():
            self._fail(f"{mark} stands behind a word")
        else:
            self._word.clear()
            self._begin_text(mark, out)
        return "".join(out)

    # ---- between texts -----------------------------------------------------------------------

    def _read_between(self, text: str, at: int, out: list[str]) -> int:
        if self._word or self._is_word_char(text[at]):
            return self._read_word(text, at, out)
        char = text[at]
        if char in " \t\r\n":
            end = _match_end(_SPACE, text, at)
            if self._comma:
                self._comma += text[at:end]
            elif self._open:
                out.append(text[at:end])
            return end
        if char in "\"'":
            self._begin_text(char, out)
        elif char in "{[(":
            self._begin_container(char, out)
        elif char in "}])":
            self._end_container(char, out)
        elif char == ",":
            self._read_comma()
        elif char == ":" or (char == "=" and (self._loose or self._in_parentheses)):
            self._read_colon(": " if char == "=" else char, out)
        else:
            self._fail(f"{char!r} stands where no value can")
        return at + 1

    def _is_word_char(self, char: str) -> bool:
        return char not in " \t\r\n,:[]{}()\"'="

    def _read_word(self, text: str, at: int, out: list[str]) -> int:
        if not self._word and self._expects in (_Expects.COLON, _Expects.COMMA_OR_END):
            self._fail(f"{text[at : at + 20]!r} stands behind a value")
            return at
        is_value = self._expects in (_Expects.VALUE, _Expects.VALUE_OR_END)
        pattern = _WORD if not self._loose else _LOOSE_VALUE if is_value else _LOOSE_WORD
        end = _match_end(pattern, text, at)
        self._word.append(text[at:end])
        if end < len(text):
            self._end_word(out)
        return end

    def _end_word(self, out: list[str]) -> None:
        word = "".join(self._word).strip()
        self._word.clear()
        if not word or self._fault:
            return
        if self._expects in (_Expects.KEY, _Expects.KEY_OR_END):
            if not self._loose and not _KEY_NAME.fullmatch(word):
                self._fail(f"{word[:40]!r} is no key")
                return
            self._tell_comma(out)
            self._key = word
            out.append(spell_text(word))
            self._expects = _Expects.COLON
            return
        spelled = self._spell_word(word)
        if spelled is None:
            self._fail(f"{word[:40]!r} is no value")
            return
        self._tell_comma(out)
        out.append(spelled)
        self._end_value()

    def _spell_word(self, word: str) -> str | None:
        if self._loose:
            schema = self._schemas[-1]
            if schema is not None and not schema.is_open:
                return schema.read(word)
        literal = _spell_literal(word)
        return spell_text(word) if literal is None and self._loose else literal

    def _begin_text(self, quote: str, out: list[str]) -> None:
        self._is_key = self._expects in (_Expects.KEY, _Expects.KEY_OR_END)
        if not self._is_key and self._expects not in (_Expects.VALUE, _Expects.VALUE_OR_END):
            self._fail("a text stands behind a value")
            return
        self._tell_comma(out)
        self._quote = quote
        self._key = "" if self._is_key else self._key
        out.append('"')

    def _end_text(self, out: list[str]) -> None:
        self._quote = ""
        out.append('"')
        if self._is_key:
            self._is_key = False
            self._expects = _Expects.COLON
        else:
            self._end_value()

    def _begin_container(self, char: str, out: list[str]) -> None:
        if self._expects not in (_Expects.VALUE, _Expects.VALUE_OR_END):
            self._fail(f"{char!r} stands where no value can")
            return
        if len(self._open) >= _MAX_DEPTH:
            self._fail(f"it is nested deeper than {_MAX_DEPTH}")
            return
        self._tell_comma(out)
        is_object = char == "{" or (char == "(" and self._in_parentheses and not self._open)
        self._open.append(("{" if is_object else "[") + _CLOSING[char])
        # A value in parentheses is no tuple yet.
        self._is_single.append(char == "(" and not is_object)
        out.append("{" if is_object else "[")
        if is_object:
            self._expects = _Expects.KEY_OR_END
        else:
            schema = self._schemas[-1]
            self._schemas.append(None if schema is None else schema.item)
            self._expects = _Expects.VALUE_OR_END

    def _end_container(self, char: str, out: list[str]) -> None:
        ends = (_Expects.COMMA_OR_END, _Expects.KEY_OR_END, _Expects.VALUE_OR_END)
        may_end = self._expects in ends or (
            bool(self._comma) and self._expects is not _Expects.COLON
        )
        if not self._open or self._open[-1][1] != char or not may_end:
            self._fail(f"{char!r} closes nothing that is open")
            return
        is_single = self._is_single.pop()
        if is_single and self._expects is _Expects.COMMA_OR_END:
            self._fail("a value in parentheses is no tuple")
            return
        is_object = self._open.pop()[0] == "{"
        out.append(self._comma.lstrip(",") if self._comma else "")
        self._comma = ""
        out.append("}" if is_object else "]")
        if not is_object:
            self._schemas.pop()
        self._end_value()

    def _end_value(self) -> None:
        if self._open and self._open[-1][0] == "{":
            self._schemas.pop()
        self._expects = _Expects.COMMA_OR_END if self._open else _Expects.OVER

    def _read_comma(self) -> None:
        if self._expects is not _Expects.COMMA_OR_END or not self._open:
            self._fail("',' stands where no value ended")
            return
        self._comma = ","
        self._is_single[-1] = False
        in_object = self._open[-1][0] == "{"
        self._expects = _Expects.KEY if in_object else _Expects.VALUE

    def _read_colon(self, spelled: str, out: list[str]) -> None:
        if self._expects is not _Expects.COLON:
            self._fail("':' stands behind no key")
            return
        schema = self._schemas[-1]
        self._schemas.append(None if schema is None else schema.field(self._key))
        out.append(spelled)
        self._expects = _Expects.VALUE

    def _tell_comma(self, out: list[str]) -> None:
        out.append(self._comma)
        self._comma = ""

    def _fail(self, reason: str) -> None:
        self._fault = self._fault or reason

    # ---- inside texts ------------------------------------------------------------------------

    def _read_text(self, text: str, at: int, out: list[str]) -> int:
        quote = self._quote
        if self._escape:
            self._escape += text[at]
            self._read_escape(out)
            return at + 1
        if quote not in _PLAIN:
            # The format's own quotes hold text as it is.
            out.append(_escape(text[at:]))
            self._note_key(text[at:])
            return len(text)
        end = _match_end(_PLAIN[quote], text, at)
        if end > at:
            out.append(text[at:end])
            self._note_key(text[at:end])
            return end
        char = text[at]
        if char == quote:
            self._end_text(out)
        elif char == "\\":
            self._escape = char
        else:
            out.append(_escape(char))
            self._note_key(char)
        return at + 1

    def _read_escape(self, out: list[str]) -> None:
        """Tell an escape when it is whole; two-part ones stay two, as in JSON."""
        letter, digits = self._escape[1], self._escape[2:]
        if letter in _HEX_DIGITS:
            if digits and digits[-1] not in "0123456789abcdefABCDEF":
                self._fail(f"{self._escape[:12]!r} is no escape")
                return
            if len(digits) < _HEX_DIGITS[letter]:
                return
            code = int(digits, 16)
            if code > 0x10FFFF:
                self._fail(f"{self._escape[:12]!r} is no escape")
                return
            spelled = self._escape if letter == "u" else _escape(chr(code), ascii_only=True)
            self._note_key(chr(code))
        elif letter in _JSON_ESCAPES:
            spelled = self._escape
            self._note_key(json.loads(f'"{spelled}"'))
        elif letter in _PYTHON_ESCAPES:
            spelled = _PYTHON_ESCAPES[letter]
            self._note_key(json.loads(f'"{spelled}"'))
        else:
            # As in Python: a backslash that escapes nothing is one.
            spelled = "\\\\" + _escape(letter)
            self._note_key("\\" + letter)
        self._escape = ""
        out.append(spelled)

    def _note_key(self, text: str) -> None:
        if self._is_key:
            self._key += text


def read_literal(text: str) -> str | None:
    """Return the JSON of a text that is one value, without outer white space; None: it is none."""
    stripped = text.strip()
    try:
        json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    else:
        return stripped
    stream = LiteralStream()
    told, end = stream.add(stripped)
    told += stream.finish()
    if end < len(stripped) or not stream.is_over:
        return None
    try:
        json.loads(told)
    except (ValueError, RecursionError):
        return None
    return told


def spell_text(text: str) -> str:
    """Return a text as JSON; of a lone surrogate, which no response can carry, its escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def _spell_literal(word: str) -> str | None:
    """A word as JSON; None: it is no value."""
    if word in _JSON_WORDS or _JSON_NUMBER.fullmatch(word):
        return word
    if word in CONSTANTS:
        return CONSTANTS[word]
    if _PYTHON_NUMBER.fullmatch(word):
        bare = word.replace("_", "").removeprefix("+")
        if _JSON_NUMBER.fullmatch(bare):
            return bare
        # A zero before a whole number: a number to some, a code to others.
        return None if bare.removeprefix("-").isdecimal() else json.dumps(float(bare))
    return None


def _escape(text: str, *, ascii_only: bool = False) -> str:
    return (json.dumps(text) if ascii_only else spell_text(text))[1:-1]


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
