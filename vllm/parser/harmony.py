"""gpt-oss answers: messages on channels, told apart by special tokens.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

``openai-harmony`` reads token ids of one vocabulary, which it downloads when it is first used; the
special tokens' texts say as much, offline and for every tokenizer that has them.
"""

import re
from collections.abc import Sequence

from vllm.parser.call_object import ArgumentsReader
from vllm.parser.calls import CallCounter
from vllm.parser.dialect import CallBegun, RawCall
from vllm.parser.interface import ParseOptions
from vllm.parser.marks import Marks
from vllm.parser.pieces import ContentText, Piece, ReasoningText

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEAD_MARKS = Marks((_MESSAGE,))
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
        self._calls = CallCounter(options)
        self._text = ""
        # None: inside a message's body.
        self._head: str | None = ""
        self._channel = ""
        self._recipient = ""
        self._arguments: ArgumentsReader | None = None
        self._is_empty = True

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        """Take in what the model said next; return what is now sure."""
        self._text += text
        pieces: list[Piece] = []
        while self._text and self._step(pieces):
            pass
        return pieces

    def finish(self, finish_reason: str | None) -> list[Piece]:
        """Return what was held back; a call that is not complete ends."""
        pieces: list[Piece] = []
        if self._head is None:
            rest, self._text = self._text, ""
            self._say(rest if not rest.startswith("<|") else "", pieces)
            # The token that ends a call ends the answer too and is no part of its text.
            self._end_message(finish_reason == "stop", pieces)
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        if self._head is None:
            before, mark, self._text = _BODY_MARKS.split(self._text)
            self._say(before, pieces)
            if mark is None:
                return False
            self._end_message(True, pieces)
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
        self._open(self._head)
        return True

    def _open(self, head: str) -> None:
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._channel = channel[1] if channel is not None else "final"
        self._recipient = recipient[1] if recipient is not None else ""
        self._head = None
        self._arguments = None
        self._is_empty = True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._recipient:
            self._add_arguments(text, pieces)
        elif self._channel == "analysis" and self._reads_reasoning:
            pieces.append(ReasoningText(text))
        else:
            pieces.append(ContentText(text))

    def _add_arguments(self, text: str, pieces: list[Piece]) -> None:
        """A call is told from the brace on that opens its arguments."""
        if self._is_empty:
            text = text.lstrip()
            if not text:
                return
            self._is_empty = False
            if text.startswith("{") and self._function:
                pieces += self._calls.pieces([CallBegun(self._function)])
                self._arguments = ArgumentsReader()
        if self._arguments is not None:
            pieces += self._calls.pieces(self._arguments.push(text))

    def _end_message(self, is_whole: bool, pieces: list[Piece]) -> None:
        if self._arguments is not None:
            pieces += self._calls.pieces(self._arguments.close())
        elif is_whole and self._is_empty and self._function:
            pieces += self._calls.pieces(RawCall(self._function, "{}").delta())
        self._recipient = ""
        self._head = ""

    @property
    def _function(self) -> str:
        """That the message calls; empty: none."""
        is_call = self._recipient.startswith(_FUNCTIONS)
        return self._recipient.removeprefix(_FUNCTIONS) if is_call else ""
