"""Formats that write a call's fields between tags, and which tags in a value count."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vllm.parser.marks import JsonEnd, Marks

MAX_HEAD_CHARS = 1024
_MAX_SPACE_CHARS = 256
_FIELD_NAME = r"\s*(?P<name>[^<>\n]+?)\s*"


@dataclass(frozen=True, slots=True)
class FieldTags:
    """How a format writes a call.

    Attributes:
        call: What a call begins with; empty: with its name.
        call_head: How that goes on; its group ``name`` is the function's.
        call_ends: What ends a call.
        field: What a field begins with.
        field_head: How that goes on; its group ``name`` is the field's; ``string``, if it has one,
            says whether the value is a text.
        field_end: What ends a field.
        block_ends: What ends a block of calls.
        blocks: What opens one.
        unsaid: Tags, whole ones and what is there of others, that say nothing by themselves.
        trims: Whether a line break before and behind a value belongs to the format.
    """

    call: str
    call_head: re.Pattern[str]
    call_ends: tuple[str, ...]
    field: str
    field_head: re.Pattern[str]
    field_end: str
    block_ends: tuple[str, ...]
    blocks: tuple[str, ...]
    unsaid: re.Pattern[str]
    trims: bool = False

    @property
    def in_value(self) -> tuple[str, ...]:
        """What may end a value."""
        return (self.field_end, self.field, *self.call_ends)

    @property
    def behind_call(self) -> tuple[str, ...]:
        """How the format goes on behind a call."""
        calls = (self.call,) if self.call else ()
        return (*self.block_ends, *self.blocks, *calls)

    def find_next(self, text: str) -> str | None:
        """Return the tag that a text between fields begins with; "": none; None: one may still."""
        return find_beginning(text, (self.field, *self.call_ends, *self.behind_call))


def find_beginning(text: str, marks: tuple[str, ...]) -> str | None:
    """Return the mark that a text begins with; "": none; None: it may still become one."""
    if text.startswith(marks):
        return next(mark for mark in marks if text.startswith(mark))
    return None if any(mark.startswith(text) for mark in marks) else ""


TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
_TAG_NAME = re.compile(r"\s*[\"']?(?P<name>[^<>\n\"']+?)[\"']?\s*>")
FUNCTION_TAGS = FieldTags(
    call=FUNCTION,
    call_head=_TAG_NAME,
    call_ends=("</function>",),
    field="<parameter=",
    field_head=_TAG_NAME,
    field_end="</parameter>",
    block_ends=(TOOL_CALL_END,),
    blocks=(TOOL_CALL,),
    unsaid=re.compile(r"</?(?:tool_call|function=?|parameter=?)>?"),
    trims=True,
)
ARGUMENT_TAGS = FieldTags(
    call="",
    call_head=re.compile(r"(?P<name>[^\s<>]+)(?=\s*(?:<arg_key>|</tool_call>))"),
    call_ends=(TOOL_CALL_END,),
    field="<arg_key>",
    field_head=re.compile(_FIELD_NAME + r"</arg_key>\s*<arg_value>"),
    field_end="</arg_value>",
    block_ends=(),
    blocks=(TOOL_CALL,),
    unsaid=re.compile(r"</?(?:tool_call|arg_key|arg_value)>?"),
)


class TagFormats:
    """The ways in which a family's models write calls between tags.

    Args:
        formats: The first is the family's own.
    """

    def __init__(self, *formats: FieldTags) -> None:
        self.all = formats
        # What may stand between calls, and where a text that is nearly a call ends.
        self.outside = tuple(
            dict.fromkeys(m for tags in formats for m in (*tags.behind_call, *tags.in_value))
        )
        self.block_ends = frozenset(mark for tags in formats for mark in tags.block_ends)
        self.named = tuple(tags for tags in formats if not tags.call)
        self.ends = Marks([m for tags in formats for m in (*tags.call_ends, *tags.block_ends)])

    def says_something(self, text: str) -> bool:
        """Whether a text is more than tags that say nothing by themselves."""
        for tags in self.all:
            text = tags.unsaid.sub("", text)
        # A brace too many, or a separator between calls, says nothing either.
        return bool(text.strip("}],; \t\r\n"))


class Found(NamedTuple):
    """What is next in a value.

    Attributes:
        num_chars: Characters that are the value's.
        mark: What ends it behind them; empty: nothing yet.
        is_open: Whether that is another tag than the value's own, and its own stands in it.
    """

    num_chars: int
    mark: str = ""
    is_open: bool = False


class ValueEnd:
    """Finds the end of one value.

    A tag in it counts only where the format goes on behind it, and not inside a text of JSON.

    Owns: how much of the text was searched, and whether that ends inside a text of JSON.

    Args:
        tags: Of the format.
        is_field: Whether a name is a field's, where one begins and the last was not ended.
        may_be_json: Whether the value is JSON if it looks like it.
    """

    def __init__(
        self, tags: FieldTags, is_field: Callable[[str], bool], *, may_be_json: bool
    ) -> None:
        self._tags = tags
        self._is_field = is_field
        self._pattern = re.compile("|".join(map(re.escape, tags.in_value)))
        self._longest = max(map(len, tags.in_value))
        # None: nothing of it is known yet.
        self._is_json: bool | None = None if may_be_json else False
        self._json = JsonEnd()
        self._num_followed = 0
        self._num_searched = 0
        self._has_passed = False
        # Whether the text that was taken ended a line.
        self._ends_line = True

    def find(self, text: str, *, is_last: bool) -> Found:
        """Return what is next; the caller takes those characters, and a mark, off the text.

        Args:
            text: All of the value that was not taken.
            is_last: Whether nothing follows it.
        """
        while True:
            found = self._pattern.search(text, self._num_searched)
            if found is None:
                kept = 0 if is_last else self._num_held(text)
                return self._take(text, Found(len(text) - kept))
            is_quoted = self._is_quoted(text, found.start())
            verdict = False if is_quoted else self._closes(text, found, is_last)
            if verdict is None:
                return self._take(text, Found(found.start()))
            if verdict:
                is_own = found[0] == self._tags.field_end
                return Found(found.start(), found[0], self._has_passed and not is_own)
            self._has_passed |= not is_quoted and found[0] == self._tags.field_end
            self._num_searched = found.end()

    def _take(self, text: str, found: Found) -> Found:
        self._is_quoted(text, found.num_chars)
        if found.num_chars:
            self._ends_line = text[found.num_chars - 1] == "\n"
        self._num_followed = max(0, self._num_followed - found.num_chars)
        self._num_searched = max(0, self._num_searched - found.num_chars)
        return found

    def _closes(self, text: str, found: re.Match[str], is_last: bool) -> bool | None:
        """Whether the format goes on behind a tag; None: more must be seen."""
        tags = self._tags
        if found[0] == tags.field:
            head = tags.field_head.match(text, found.end(), found.end() + MAX_HEAD_CHARS)
            if head is not None:
                begin = found.start()
                has_line = text[begin - 1] == "\n" if begin else self._ends_line
                return has_line or (not tags.trims and self._is_field(head["name"]))
            return None if len(text) - found.end() < MAX_HEAD_CHARS and not is_last else False
        follows = tags.behind_call
        if found[0] == tags.field_end:
            follows = (tags.field, *tags.call_ends, *follows)
        rest = text[found.end() : found.end() + _MAX_SPACE_CHARS]
        behind = rest.lstrip()
        if any(behind.startswith(mark) for mark in follows):
            return True
        if len(rest) == _MAX_SPACE_CHARS or not any(mark.startswith(behind) for mark in follows):
            return False
        # The end of the answer closes it where nothing else stands behind it.
        return True if is_last else None

    def _is_quoted(self, text: str, end: int) -> bool:
        """Whether a place in a value is inside a text of JSON."""
        if self._is_json is None:
            begun = text[:end].lstrip()
            self._is_json = begun[0] in '{["' if begun else None
        if not self._is_json:
            return False
        self._json.find_end(text[self._num_followed : end])
        self._num_followed = max(self._num_followed, end)
        return self._json.in_string

    def _num_held(self, text: str) -> int:
        """Characters at the end that may begin a tag."""
        for at in range(max(self._num_searched, len(text) - self._longest + 1), len(text)):
            if any(mark.startswith(text[at:]) for mark in self._tags.in_value):
                return len(text) - at
        return 0
