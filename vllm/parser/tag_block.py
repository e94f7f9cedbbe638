"""Blocks of calls between tags, told while they are read.

         a name               a field            its name           its end
OUTSIDE --------> BODY ---------------> FIELD -------------> VALUE ---------> BODY
   |                 | the call's end
   |<----------------+
   |-- a brace -----> OBJECT ---> OUTSIDE
   |-- a near miss -> LOOSE ----> OUTSIDE

One reader for all families that do so, whichever of the ways of writing a call a model takes.
Between fields there is nothing but white space: what stands there is no field, and no call is whole
that leaves it out.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto

from vllm.parser.dialect import CallBlockDelta, CallCut, CallDelta, CallFailed, RawCall
from vllm.parser.field_tags import MAX_HEAD_CHARS, TagFormats, ValueEnd, find_beginning
from vllm.parser.json_call import JsonCallReader, call_of_object
from vllm.parser.literals import LiteralStream
from vllm.parser.near_misses import may_begin, read_calls
from vllm.parser.object_writer import ObjectWriter
from vllm.parser.offered import Offered
from vllm.parser.schemas import Schema
from vllm.tokenizers.tool_calls import split_object

_NAME_WORD = re.compile(r"[^\s<>{}()\[\]\"',=]{1,256}\s{0,256}")


class _State(Enum):
    OUTSIDE = auto()
    CALL = auto()  # in the head of a call
    BODY = auto()
    FIELD = auto()  # in the head of a field
    VALUE = auto()
    ARGUMENTS = auto()  # all fields of a call as one object
    OBJECT = auto()  # a call as an object
    LOOSE = auto()


class TagBlockReader:
    """Reads a block of calls; see BlockReader.

    Owns: the text that is not yet sure, the call that is open and its text so far.

    Args:
        formats: Ways of writing a call.
        offered: Functions that may be called.
        opened_by: The text that opened the block, as it was written.
        is_outer: Whether that is the block's own tag; else it begins what stands in it.
    """

    def __init__(
        self, formats: TagFormats, offered: Offered, opened_by: str, *, is_outer: bool
    ) -> None:
        self._formats = formats
        self._tags = formats.all[0]
        self._offered = offered
        self._state = _State.OUTSIDE
        begun = "" if is_outer else opened_by.lstrip("\n")
        self._text = begun
        # Of what is no whole call yet: it is told as text where it turns out to be none.
        self._raw = [opened_by.removesuffix(begun)]
        # What opened the block is read once: where that was for nothing, it is text.
        self._num_opening = len(begun)
        self._is_last = False
        self._num_whole = 0
        self._name = ""
        self._schema = Schema({})
        self._writer: ObjectWriter | None = None
        self._value: ValueEnd | None = None
        self._object: JsonCallReader | None = None
        self._arguments = LiteralStream()
        self._told: list[str] = []
        # A call whose object had to be read whole, until something follows it.
        self._held: list[CallDelta] = []
        self._held_raw: list[str] = []
        self._loose: list[str] = []

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        self._text += text
        delta = CallBlockDelta()
        while not delta.ended and _STEPS[self._state](self, delta):
            pass
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """Take in the end of the answer: what closed a call is known to have, now."""
        self._is_last = True
        delta = self.push("")
        if delta.ended:
            return delta
        delta.ended = True
        self._take(len(self._text))
        if finish_reason == "stop":
            delta.calls += self._held
        elif self._held:
            delta.calls.append(CallCut("".join(self._held_raw)))
        if self._object is not None:
            delta.calls += self._object.close()
            if self._object.is_over:
                self._raw.clear()
        if self._state is _State.LOOSE:
            delta.calls += self._end_loose() if finish_reason == "stop" else []
            self._raw += self._loose
        if self._writer is not None:
            delta.calls += self._writer.cut_off()
        left = self._failed("the call is not closed")
        if finish_reason == "stop":
            delta.calls += left
        elif not self._has_told:
            delta.calls += [CallCut(item.text) for item in left if isinstance(item, CallFailed)]
        return delta

    @property
    def _has_told(self) -> bool:
        """Whether the call that is open was told to begin."""
        has_object = self._object is not None and self._object.has_told
        return has_object or (self._writer is not None and self._writer.has_begun)

    # ---- between calls -----------------------------------------------------------------------

    def _step_outside(self, delta: CallBlockDelta) -> bool:
        self._take_space()
        begun = self._text
        if not begun:
            return False
        delta.calls += self._held
        self._held = []
        mark = find_beginning(begun, self._formats.outside)
        if mark:
            return self._read_mark(delta, mark)
        if begun[0] == "{":
            self._object = JsonCallReader(self._offered)
            self._state = _State.OBJECT
            return True
        if self._num_whole and begun[0] in "}],;":
            # One brace too many, or a separator.
            self._take(1)
            return True
        return self._step_name(delta, begun)

    def _read_mark(self, delta: CallBlockDelta, mark: str) -> bool:
        self._take(len(mark))
        for tags in self._formats.all:
            if mark == tags.call:
                self._tags = tags
                self._state = _State.CALL
        is_end = mark in self._formats.block_ends
        return self._end_block(delta, "") if is_end else True

    def _step_name(self, delta: CallBlockDelta, begun: str) -> bool:
        """A call that begins with its name, or is nearly one."""
        for tags in self._formats.named:
            head = tags.call_head.match(begun, 0, MAX_HEAD_CHARS)
            if head is not None and self._offered.has(head["name"]):
                self._tags = tags
                self._take(head.end())
                self._begin_call(head["name"])
                return True
        if not self._is_last and self._may_be_mark(begun):
            return False
        near = may_begin(begun, self._offered) if self._num_whole == 0 else False
        if near:
            self._state = _State.LOOSE
            return True
        if near is None and not self._is_last:
            return False
        if self._num_whole and not "".join(self._raw).strip():
            # The block's own end was left out.
            delta.ended, delta.rest = True, self._text
            return False
        if self._is_last:
            return False
        self._take(self._num_opening)
        delta.calls += self._failed("no call stands in its place", says_nothing=False)
        delta.ended, delta.rest = True, self._text
        return False

    def _may_be_mark(self, begun: str) -> bool:
        """Whether a tag, or a name and the tag behind it, may still follow."""
        if find_beginning(begun, self._formats.outside) is None:
            return True
        word = _NAME_WORD.match(begun)
        if word is None or not self._formats.named:
            return False
        name, rest = word[0].rstrip(), begun[word.end() :]
        is_over = len(word[0]) > len(name) or bool(rest)
        if not (self._offered.has(name) if is_over else self._offered.may_begin(name)):
            return False
        named = self._formats.named
        follows = [mark for tags in named for mark in (tags.field, *tags.call_ends)]
        return any(mark.startswith(rest) for mark in follows)

    def _step_call(self, delta: CallBlockDelta) -> bool:
        head = self._head(self._tags.call_head)
        if head is None and self._text.startswith(self._tags.call):
            # A tag that is doubled opens what it has opened.
            self._take(_run_end(self._text, self._tags.call))
            return True
        if head is None:
            return self._is_hopeless and self._end_block(delta, "its tag has no name")
        if not self._offered.has(head["name"]):
            return self._end_block(delta, self._offered.refusal(head["name"]))
        self._begin_call(head["name"])
        return True

    def _begin_call(self, name: str) -> None:
        self._name = name
        self._schema = self._offered.schema(name)
        self._writer = ObjectWriter(name, self._schema, trims=self._tags.trims)
        self._state = _State.BODY

    # ---- a call with fields ------------------------------------------------------------------

    def _step_body(self, delta: CallBlockDelta) -> bool:
        assert self._writer is not None
        tags = self._tags
        self._take_space()
        begun = self._text
        if not begun:
            return False
        mark = tags.find_next(begun)
        if mark is None:
            return False
        if mark == tags.field:
            self._take(len(mark))
            self._state = _State.FIELD
            return True
        if mark:
            is_end = mark in tags.call_ends
            self._take(len(mark) if is_end else 0)
            delta.calls += self._writer.end()
            return self._end_call(delta, self._writer.fault, mark if is_end else "")
        if begun[0] == "{" and not self._writer.has_begun:
            self._arguments, self._told = LiteralStream(), []
            self._state = _State.ARGUMENTS
            return True
        return self._end_block(delta, "something stands outside of its fields")

    def _step_field(self, delta: CallBlockDelta) -> bool:
        assert self._writer is not None
        head = self._head(self._tags.field_head)
        if head is None:
            return self._is_hopeless and self._end_block(delta, "a field's tag has no name")
        said = head.groupdict().get("string")
        is_text = None if said is None else said == "true"
        name = head["name"]
        delta.calls += self._writer.open(name, is_text)
        takes_any_text = self._schema.field(name).takes_any_text
        self._value = ValueEnd(
            self._tags,
            lambda key: not self._schema.field_names or key in self._schema.field_names,
            may_be_json=is_text is False or (is_text is None and not takes_any_text),
        )
        self._state = _State.VALUE
        return True

    def _step_value(self, delta: CallBlockDelta) -> bool:
        assert self._writer is not None
        assert self._value is not None
        num_chars, mark, is_open = self._value.find(self._text, is_last=self._is_last)
        delta.calls += self._writer.add(self._text[:num_chars])
        self._take(num_chars)
        if not mark:
            return False
        if is_open:
            return self._end_block(delta, "where a value ends is open")
        if mark == self._tags.field_end:
            self._take(len(mark))
        delta.calls += self._writer.close(is_tagged=mark == self._tags.field_end)
        self._state = _State.BODY
        return True

    def _step_arguments(self, delta: CallBlockDelta) -> bool:
        """All fields as one object, where tags should stand: told when it is whole."""
        told, end = self._arguments.add(self._text)
        self._told.append(told)
        self._take(end)
        if self._arguments.fault:
            return self._end_block(delta, self._arguments.fault)
        if not self._arguments.is_over:
            return False
        self._take_space()
        mark = find_beginning(self._text, (*self._tags.call_ends, *self._tags.behind_call))
        if mark is None and not self._is_last:
            return False
        if not mark:
            return self._end_block(delta, "something stands behind its arguments")
        is_end = mark in self._tags.call_ends
        self._take(len(mark) if is_end else 0)
        arguments = "".join(self._told)
        inner = call_of_object(arguments)
        if inner is not None and inner.name == self._name:
            arguments = inner.arguments
        if split_object(arguments) is None:
            return self._end_block(delta, "its arguments are no JSON")
        delta.calls += RawCall(self._name, arguments).delta()
        return self._end_call(delta, "", mark if is_end else "")

    def _end_call(self, delta: CallBlockDelta, fault: str, mark: str) -> bool:
        self._writer = None
        self._state = _State.OUTSIDE
        if fault:
            delta.calls += self._failed(fault)
            delta.ended, delta.rest = True, self._text
            return False
        self._num_whole += 1
        self._raw.clear()
        if mark and not self._tags.block_ends:
            # The call's end is its block's.
            delta.ended, delta.rest = True, self._text
        return not delta.ended

    # ---- calls in other spellings ------------------------------------------------------------

    def _step_object(self, delta: CallBlockDelta) -> bool:
        assert self._object is not None
        text, self._text = self._text, ""
        told, rest = self._object.push(text)
        if self._object.is_over and not self._object.has_told:
            self._held, told = told, []
        delta.calls += told
        self._raw.append(text[: len(text) - len(rest)])
        self._text = rest
        if self._object.fault:
            fault, self._object = self._object.fault, None
            return self._end_block(delta, fault)
        if self._object.is_over:
            self._object = None
            self._num_whole += 1
            self._held_raw, self._raw = self._raw, []
            self._state = _State.OUTSIDE
            return True
        return False

    def _step_loose(self, delta: CallBlockDelta) -> bool:
        before, mark, self._text = self._formats.ends.split(self._text)
        self._loose.append(before)
        if mark is None:
            return False
        self._text = mark + self._text
        calls = self._end_loose()
        self._state = _State.OUTSIDE
        if not calls:
            self._take(len(mark))
            return self._end_block(delta, "no call can be read in it")
        delta.calls += calls
        return True

    def _end_loose(self) -> list[CallDelta]:
        """Tell the calls that a text nearly is."""
        text = "".join(self._loose)
        self._loose.clear()
        calls = read_calls(text, self._offered)
        if not calls:
            self._raw.append(text)
            return []
        self._num_whole += len(calls)
        self._raw.clear()
        return [item for call in calls for item in call.delta()]

    # ---- what becomes of text ----------------------------------------------------------------

    def _head(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take the rest of a tag; None: it is not there."""
        # A fixed length: what is told may not depend on how the text came.
        head = pattern.match(self._text, 0, MAX_HEAD_CHARS)
        if head is not None:
            self._take(head.end())
        return head

    @property
    def _is_hopeless(self) -> bool:
        return len(self._text) >= MAX_HEAD_CHARS

    def _take_space(self) -> None:
        self._take(len(self._text) - len(self._text.lstrip()))

    def _take(self, num_chars: int) -> None:
        """Read over text that the format has, or that is told."""
        self._raw.append(self._text[:num_chars])
        self._text = self._text[num_chars:]
        self._num_opening = max(0, self._num_opening - num_chars)

    def _end_block(self, delta: CallBlockDelta, reason: str) -> bool:
        """End the block: what is no whole call in it is text, and what follows is read anew."""
        if self._writer is not None:
            delta.calls += self._writer.cut_off()
        self._take(self._num_opening)
        delta.calls += self._failed(reason)
        delta.ended, delta.rest = True, self._text
        return False

    def _failed(self, reason: str, *, says_nothing: bool = True) -> list[CallDelta]:
        """All that is no call; marks alone say nothing, unless something stands behind them."""
        text = "".join(self._raw)
        self._raw.clear()
        says_nothing = says_nothing and not self._formats.says_something(text)
        return [] if says_nothing else [CallFailed(text, reason)]


def _run_end(text: str, mark: str) -> int:
    """Characters of a mark at the beginning of a text, however often it stands there."""
    end = 0
    while text.startswith(mark, end):
        end += len(mark)
    return end


_STEPS: Mapping[_State, Callable[[TagBlockReader, CallBlockDelta], bool]] = {
    _State.OUTSIDE: TagBlockReader._step_outside,
    _State.CALL: TagBlockReader._step_call,
    _State.BODY: TagBlockReader._step_body,
    _State.FIELD: TagBlockReader._step_field,
    _State.VALUE: TagBlockReader._step_value,
    _State.ARGUMENTS: TagBlockReader._step_arguments,
    _State.OBJECT: TagBlockReader._step_object,
    _State.LOOSE: TagBlockReader._step_loose,
}
