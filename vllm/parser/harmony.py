"""gpt-oss answers: messages on channels, told apart by special tokens.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

``openai-harmony`` reads token ids of one vocabulary, which it downloads when it is first used; the
special tokens' texts say as much, offline and for every tokenizer that has them.
"""

import re
from collections.abc import Sequence

from vllm.parser.calls import CallCounter
from vllm.parser.dialect import CallBegun, CallCut, CallDelta, CallEnded, CallFailed, RawCall
from vllm.parser.interface import ParseOptions, ToolUse
from vllm.parser.json_call import ArgumentsReader
from vllm.parser.marks import Marks, parts_of
from vllm.parser.near_misses import read_calls
from vllm.parser.offered import Offered
from vllm.parser.pieces import ContentText, Piece, ReasoningText

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CLOSING = ("<|end|>", "<|call|>", "<|return|>")
_HEAD_MARKS = Marks((_MESSAGE, *_CLOSING))
# What a head says to the format alone.
_OF_HEADS = re.compile(
    r"<\|\w*\|?>?|\b(?:assistant|analysis|commentary|final|json|to=functions\.)|\s+"
)
_CHANNELS = ("analysis", "commentary", "final", "assistant")
_BODY_MARKS = Marks(_ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_HEAD_BEGINS = ("<|", "to=", "assistant")


class HarmonyParser:
    """Reads one answer; see ResponseParser.

    Owns: the head of the message that is read, its kind, and the text that is not yet sure.

    Args:
        reads_reasoning: Whether the analysis is told apart; else it is content.
        options: Of the request.
    """

    def __init__(self, reads_reasoning: bool, options: ParseOptions) -> None:
        self._reads_reasoning = reads_reasoning
        self._offered = Offered(options.tools)
        self._calls = CallCounter(options)
        self._text = ""
        # None: inside a message's body.
        self._head: str | None = ""
        self._channel = ""
        self._call: _CallMessage | None = None
        # What the request forbids, told only where no answer is.
        self._swallowed: list[str] = []
        self._may_call = options.tool_use is ToolUse.PARSE
        self._has_answered = False

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take in what the model said next; return what is now sure."""
        pieces: list[Piece] = []
        for part in parts_of(text):
            self._text += part
            while self._text and self._step(pieces):
                pass
        return pieces

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return what was held back; a call that is not complete ends."""
        pieces: list[Piece] = []
        rest, self._text = self._text, ""
        if self._head is None:
            self._say(rest if not rest.startswith("<|") else "", pieces)
            if self._call is not None:
                self._end_call(self._call, finish_reason, "", pieces)
        elif finish_reason == "stop":
            self._end_head(self._head + rest, pieces, is_cut=True)
        elif _says_more(self._head + rest, is_cut=True):
            self._swallowed.append(self._head + rest)
        if not self._has_answered:
            # An answer that says something is not told as nothing.
            untold = "".join(self._swallowed) + self._calls.cut
            pieces += [ContentText(untold)] if untold else []
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._head is None:
            before, mark, self._text = _BODY_MARKS.split(self._text)
            self._say(before, pieces)
            if mark is None:
                return False
            if self._call is not None and self._call.in_text:
                # JSON is read as JSON: its texts may spell marks.
                self._say(mark, pieces)
                return True
            self._end_message(pieces, mark)
            self._head = mark if mark == "<|channel|>" else ""
            return True
        if not self._head:
            text = self._text.lstrip()
            if any(begin.startswith(text) for begin in _HEAD_BEGINS):
                return False
            if not text.startswith(_HEAD_BEGINS):
                # A model that writes no heads: all it says is its answer.
                self._open("<|channel|>final")
                return True
        before, mark, self._text = _HEAD_MARKS.split(self._text)
        self._head += before
        if mark is None:
            return False
        if mark != _MESSAGE:
            self._end_head(self._head + mark, pieces)
            self._head = ""
            return True
        head = self._head
        self._open(head)
        if self._call is None:
            self._end_head_of_text(head, pieces)
        elif not self._call.fault and _says_more(_RECIPIENT.sub("", head)):
            # Not a word of the format, and none of the call.
            pieces.append(ContentText(_OF_HEADS.sub("", _RECIPIENT.sub("", head))))
        return True

    def _end_head_of_text(self, head: str, pieces: list[Piece]) -> None:
        if _says_more(head):
            self._channel = "final"
            self._say(head + _MESSAGE, pieces)

    def _end_head(self, head: str, pieces: list[Piece], *, is_cut: bool = False) -> None:
        """A head without a message: what it says beyond the format's words is text."""
        if _says_more(head, is_cut=is_cut):
            self._channel, self._call = "final", None
            self._say(head, pieces)

    def _open(self, head: str) -> None:
        channel, recipients = _CHANNEL.search(head), _RECIPIENT.findall(head)
        self._channel = channel[1] if channel is not None else "final"
        self._head = None
        self._call = None
        if recipients:
            self._call = _CallMessage(head + _MESSAGE, recipients, self._offered)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._call is not None:
            told = self._calls.pieces(self._call.add(text))
            self._has_answered |= bool(told)
            pieces += told
        elif self._channel == "analysis" and self._reads_reasoning:
            pieces.append(ReasoningText(text))
        else:
            self._has_answered |= not text.isspace()
            pieces.append(ContentText(text))

    def _end_message(self, pieces: list[Piece], mark: str) -> None:
        if self._call is not None:
            # The token that ends a call ends the answer too and is no part of its text.
            self._end_call(self._call, "stop", mark if mark in _CLOSING else "", pieces)
        self._call = None
        self._head = ""

    def _end_call(
        self, call: "_CallMessage", finish_reason: str | None, mark: str, pieces: list[Piece]
    ) -> None:
        told = self._calls.pieces(call.end(finish_reason, mark))
        self._has_answered |= bool(told)
        pieces += told
        if not self._may_call:
            self._swallowed.append(call.raw + mark)


def _says_more(head: str, *, is_cut: bool = False) -> bool:
    """Whether a head says more than the format's own words, or where it is cut their beginnings."""
    rest = _OF_HEADS.sub(" ", head).split()
    if is_cut:
        rest = [part for part in rest if not any(word.startswith(part) for word in _CHANNELS)]
    return bool(rest)


class _CallMessage:
    """One message to a recipient.

    Owns: its text, and the reader of its arguments from the brace on that opens them.

    Args:
        head: All that stands before its body.
        recipients: As the head names them; where they differ nobody can say whose the body is.
        offered: Functions that may be called.
    """

    def __init__(self, head: str, recipients: Sequence[str], offered: Offered) -> None:
        self._raw = [head]
        names = list(dict.fromkeys(item.removeprefix(_FUNCTIONS) for item in recipients))
        self._name = names[0]
        self._fault = "" if offered.has(self._name) else offered.refusal(self._name)
        if len(names) > 1:
            self._fault = f"its head names several recipients: {', '.join(names)}"
        self._offered = offered
        self._arguments: ArgumentsReader | None = None
        self._tail: list[str] = []

    @property
    def raw(self) -> str:
        """All of the message so far."""
        return "".join(self._raw)

    @property
    def fault(self) -> str:
        """Why it is no call, as far as it was read; empty: nothing speaks against it."""
        return self._fault

    @property
    def in_text(self) -> bool:
        """Whether what was read so far ends inside a text of the arguments."""
        return not self._fault and self._arguments is not None and self._arguments.in_text

    def add(self, text: str) -> list[CallDelta]:
        """Take in more of the body."""
        self._raw.append(text)
        if self._fault:
            return []
        delta: list[CallDelta] = []
        if self._arguments is None:
            text = text.lstrip()
            if not text:
                return []
            if text[0] != "{":
                self._fault = "its arguments are no object"
                return []
            self._arguments = ArgumentsReader()
            delta.append(CallBegun(self._name))
        told, rest = self._arguments.push(text)
        self._tail.append(rest)
        self._fault = self._arguments.fault
        return delta + told

    def end(self, finish_reason: str | None, mark: str = "") -> list[CallDelta]:
        """Take in the end of the message; ``mark`` closed it."""
        has_stopped = finish_reason == "stop"
        raw = "".join(self._raw) + mark
        arguments = self._arguments
        if arguments is None:
            if not self._fault and has_stopped:
                return RawCall(self._name, "{}").delta()
            calls = self._near_misses() if has_stopped else []
            if calls:
                return calls
            return [CallFailed(raw, self._fault)] if has_stopped else [CallCut(raw)]
        if arguments.is_whole and not self._fault:
            tail = "".join(self._tail)
            said = tail.strip("} \n\t")
            ended: list[CallDelta] = [CallEnded(True)]
            # What stands behind the object is said to whoever reads the answer.
            return [*ended, CallFailed(tail, "it stands behind a call")] if said else ended
        if not has_stopped:
            return [CallEnded(False)]
        return [CallEnded(False), CallFailed(raw, self._fault or "its arguments are not closed")]

    def _near_misses(self) -> list[CallDelta]:
        body = "".join(self._raw[1:])
        calls = read_calls(body, self._offered)
        return [item for call in calls for item in call.delta()]
