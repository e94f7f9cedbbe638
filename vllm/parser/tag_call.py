"""One call whose fields stand between tags, told while it is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.parser.dialect import CallDelta
from vllm.parser.object_writer import ObjectWriter

_MAX_HEAD_CHARS = 4096


@dataclass(frozen=True, slots=True)
class TagHeads:
    """How the tags of a call and of a field go on behind their beginnings.

    Attributes:
        call: Its group ``name`` is the function's.
        field: Its group ``name`` is the field's; ``string``, if it has one, says whether the value
            is a text.
        trims: Whether a line break before and behind a value belongs to the format.
    """

    call: re.Pattern[str]
    field: re.Pattern[str]
    trims: bool = False


DSML_HEADS = TagHeads(
    re.compile(r'\s+name\s*=\s*"(?P<name>[^"]+)"\s*>'),
    re.compile(r'\s+name\s*=\s*"(?P<name>[^"]*)"(?:\s+string\s*=\s*"(?P<string>true|false)")?\s*>'),
)


class InvokeReader:
    """Reads a call behind the beginning of its tag, up to its end; its tags are told apart before.

         name read       a field          its name read      its end
    HEAD ---------> BODY -----------> FIELD ----------> VALUE -----> BODY

    Owns: the head that is being read, and the call's writer.

    Args:
        schemas: Of the tools' arguments, by name; they type what the model left open.
        heads: How the tags go on.
    """

    def __init__(
        self, schemas: Mapping[str, Mapping[str, Any]], heads: TagHeads = DSML_HEADS
    ) -> None:
        self._schemas = schemas
        self._heads = heads
        self._pattern: re.Pattern[str] | None = heads.call
        self._head = ""
        self._writer: ObjectWriter | None = None
        self._is_broken = False

    def add_text(self, text: str) -> list[CallDelta]:
        """Take in text without tags."""
        if self._is_broken:
            return []
        if self._pattern is None:
            return self._writer.add(text) if self._writer is not None else []
        self._head += text
        # A fixed length: what is told may not depend on how the text came.
        head = self._pattern.match(self._head, 0, _MAX_HEAD_CHARS)
        if head is None:
            self._is_broken = len(self._head) >= _MAX_HEAD_CHARS
            return []
        rest = self._head[head.end() :]
        self._pattern, self._head = None, ""
        if self._writer is None:
            self._writer = ObjectWriter(head["name"], self._schemas, trims=self._heads.trims)
            return self._writer.begin()
        said = head.groupdict().get("string")
        is_text = None if said is None else said == "true"
        return self._writer.open(head["name"], is_text) + self._writer.add(rest)

    def begin_parameter(self) -> list[CallDelta]:
        """Take in the beginning of a field; one that is open ends."""
        self._is_broken |= self._pattern is not None
        if self._is_broken or self._writer is None:
            return []
        self._pattern = self._heads.field
        return self._writer.close(is_tagged=False) + self._writer.flush()

    def end_parameter(self) -> list[CallDelta]:
        """Take in a field's end."""
        self._is_broken |= self._pattern is not None
        return [] if self._is_broken or self._writer is None else self._writer.close()

    def end(self) -> list[CallDelta]:
        """Take in the end of the call."""
        if self._writer is None:
            return []
        is_whole = not self._is_broken and self._pattern is None
        return self._writer.end() if is_whole else self._writer.cut_off()

    def cut_off(self) -> list[CallDelta]:
        """Nothing follows: the call may lack arguments."""
        return [] if self._writer is None else self._writer.cut_off()
