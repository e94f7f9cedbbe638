"""Calls in sections between special tokens: Kimi's and DeepSeek's, of V3, V3.1 and V3.2-Exp.

<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>
    {"text": "x"}<|tool_call_end|><|tool_calls_section_end|>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>
    {"text": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3 and R1 write "function" for the head; the name follows, and a fence around the arguments.
"""

import re

from vllm.parser.call_ids import is_kimi_id
from vllm.parser.dialect import (
    CallBegun,
    CallBlockDelta,
    CallCut,
    CallDelta,
    CallEnded,
    CallFailed,
    CallText,
)
from vllm.parser.json_call import ArgumentsReader
from vllm.parser.marks import JsonEnd, Marks
from vllm.parser.near_misses import read_calls
from vllm.parser.offered import Offered

_HEAD = re.compile(r"\s*(?:functions\.)?(?P<name>.+?)(?::\d+)?\s*", re.DOTALL)
# Behind a kind: the name, and the fence that opens, and closes where there are no arguments.
_FENCED = re.compile(r"\s*(?P<name>[^\s`]+)[\s`]*(?:json)?[\s`]*")
_MAX_HEAD_CHARS = 1024


class MarkedSectionDialect:
    """See ToolDialect. Kimi numbers its calls, and its prompts show these ids again.

    Args:
        sections: What opens a section: the family's own mark, then others that models write.
        ends: What closes one, likewise.
        begin: Opens a call.
        separator: Stands between its head and its arguments.
        end: Closes it.
        telltale: What all of these begin with.
        kind: A head behind which the name follows, and a fence; empty: there is none.
    """

    leads: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ()
    ends_reasoning = True
    is_special = True

    def __init__(
        self,
        sections: tuple[str, ...],
        ends: tuple[str, ...],
        begin: str,
        separator: str,
        end: str,
        telltale: str,
        kind: str = "",
    ) -> None:
        self.ends, self.begin, self.separator, self.end = ends, begin, separator, end
        self.marks = (*sections, begin)
        self.telltales, self.kind = (telltale,), kind
        self.all_marks = (*ends, *sections, begin, separator, end)
        self.within = Marks(self.all_marks)

    def read_block(self, opened_by: str, offered: Offered) -> "_SectionReader":
        """Return the reader of what follows a mark."""
        return _SectionReader(self, opened_by, offered)


KIMI = MarkedSectionDialect(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_",
)
DEEPSEEK = MarkedSectionDialect(
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁",
    "function",
)


class _SectionReader:
    """Reads one section.

    Owns: the text of the call that is open, its head, then its arguments.
    """

    def __init__(self, tags: MarkedSectionDialect, opened_by: str, offered: Offered) -> None:
        self._tags, self._offered = tags, offered
        self._text = ""
        self._raw = [opened_by]
        # Whether the section's own tag was left out.
        self._is_bare = opened_by == tags.begin
        # Models leave the call's own tag out: what stands first is its head all the same.
        self._head: list[str] | None = []
        self._head_json = JsonEnd()
        self._is_fenced = False
        self._name = ""
        self._id = ""
        self._arguments: ArgumentsReader | None = None
        self._has_told = False
        self._tail: list[str] = []
        self._fault = ""

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta()
        self._text += text
        while True:
            before, mark, self._text = self._tags.within.split(self._text)
            self._raw.append(before)
            delta.calls += self._add(before)
            if mark is None:
                return delta
            if self._in_text:
                # JSON is read as JSON: its texts may spell marks.
                self._raw.append(mark)
                delta.calls += self._add(mark)
                continue
            if mark == self._tags.separator:
                self._raw.append(mark)
                self._begin()
                continue
            if mark == self._tags.begin:
                delta.calls += self._end()
                self._head, self._head_json = [], JsonEnd()
                self._raw.append(mark)
                continue
            self._raw.append(mark)
            delta.calls += self._end()
            if mark in self._tags.ends or (self._is_bare and mark == self._tags.end):
                delta.ended, delta.rest = True, self._text
                return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """End a call that is open: it may lack arguments."""
        self._raw.append(self._text)
        is_open = self._arguments is not None and not self._arguments.is_over
        if finish_reason == "stop" or not (is_open or self._head is not None):
            return CallBlockDelta(self._end(is_closed=False), ended=True)
        if self._has_told:
            return CallBlockDelta([CallEnded(False)], ended=True)
        return CallBlockDelta([CallCut("".join(self._raw))], ended=True)

    @property
    def _in_text(self) -> bool:
        if self._arguments is not None:
            return not self._fault and self._arguments.in_text
        return self._head_json.in_string and "".join(self._head or ())[:256].lstrip()[:1] == "{"

    def _add(self, text: str) -> list[CallDelta]:
        if self._arguments is None:
            if self._head is not None:
                self._head.append(text)
                self._head_json.find_end(text)
                begins = self._is_fenced and not self._fault and "{" in text
                return self._begin_fenced() if begins else []
            if text.strip():
                self._fault = self._fault or "no call begins there"
            return []
        if self._fault:
            return []
        if not self._has_told:
            text = text.lstrip()
            if not text:
                return []
            if text[0] != "{":
                self._fault = "its arguments are no object"
                return []
        delta: list[CallDelta] = [] if self._has_told else [CallBegun(self._name, self._id)]
        self._has_told = True
        told, rest = self._arguments.push(text)
        self._tail.append(rest)
        self._fault = self._arguments.fault
        return delta + told

    def _begin(self) -> None:
        head = "".join(self._head or ())
        named = _HEAD.fullmatch(head[:_MAX_HEAD_CHARS])
        name = "" if named is None else named["name"].strip()
        if self._arguments is not None or self._head is None:
            self._fault = self._fault or "its tags stand in another order"
            return
        if name and name == self._tags.kind and not self._offered.has(name):
            self._head, self._head_json, self._is_fenced = [], JsonEnd(), True
            return
        if self._can_call(name):
            self._id = head.strip() if is_kimi_id(head.strip()) else ""

    def _begin_fenced(self) -> list[CallDelta]:
        """Begin where a brace tells that what stands before it is a name and a fence."""
        before, brace, rest = "".join(self._head or ()).partition("{")
        return self._add(brace + rest) if self._can_call(_find_fenced_name(before)) else []

    def _can_call(self, name: str) -> bool:
        """Begin the arguments of a call, unless no such function was offered."""
        if not self._offered.has(name):
            self._fault = self._fault or self._offered.refusal(name)
            return False
        self._head, self._name, self._id = None, name, ""
        self._arguments = ArgumentsReader()
        return True

    def _end(self, *, is_closed: bool = True) -> list[CallDelta]:
        """End the call that is open, or what stands between calls."""
        if self._is_fenced and self._head is not None and is_closed:
            name = _find_fenced_name("".join(self._head))
            if self._offered.has(name):
                self._can_call(name)
        head, self._head = self._head, None
        self._is_fenced = False
        arguments, self._arguments = self._arguments, None
        has_told, self._has_told = self._has_told, False
        fault, self._fault = self._fault, ""
        tail, self._tail = "".join(self._tail), []
        raw = "".join(self._raw)
        self._raw.clear()
        if arguments is not None and not fault and not has_told and is_closed:
            return [CallBegun(self._name, self._id), CallText("{}"), CallEnded(True)]
        if arguments is not None and has_told and not fault:
            if tail.strip("} \n\t`"):
                fault = "something stands behind its arguments"
            elif arguments.is_whole:
                return [CallEnded(True)]
            else:
                fault = "its arguments are not closed"
        if head is not None and arguments is None:
            calls = read_calls("".join(head), self._offered)
            if calls:
                return [item for call in calls for item in call.delta()]
        said = raw
        for mark in self._tags.all_marks:
            said = said.replace(mark, "")
        ended: list[CallDelta] = [CallEnded(False)] if has_told else []
        if not said.strip():
            return ended
        return [*ended, CallFailed(raw, fault or "it has no arguments")]


def _find_fenced_name(head: str) -> str:
    """Return the name that a head of a call with a fence is; empty: it is something else."""
    named = _FENCED.fullmatch(head[:_MAX_HEAD_CHARS])
    return "" if named is None else named["name"]
