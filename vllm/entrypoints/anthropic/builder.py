"""From the pieces of an answer to the blocks of a message, and the events that tell of them."""

import json
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from vllm.entrypoints.anthropic.bodies import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    MessageBody,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from vllm.entrypoints.openai.opaque_reasoning import seal_reasoning
from vllm.parser.pieces import (
    ContentText,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    settle_thoughts,
)


class MessageBuilder:
    """Builds one message; every step returns the events that a stream shows.

    Owns: the message, its open block and that one's index.

    Args:
        body: The message before its first token.
        hides_thinking: Whether thinking is told by its signature alone (``display: omitted``).
    """

    def __init__(self, body: MessageBody, *, hides_thinking: bool = False) -> None:
        self._body = body
        self._hides_thinking = hides_thinking
        self._block: Block | None = None
        self._texts: list[str] = []
        self._index = 0

    @property
    def body(self) -> MessageBody:
        """The message as it is; a block that is not complete is not in it."""
        return self._body

    def start(self, usage: MessageUsage) -> list[Event]:
        """Begin.

        Args:
            usage: As far as it is known: of the prompt.
        """
        self._body = replace(self._body, usage=usage)
        return [MessageStart(self._body), Ping()]

    def add(self, pieces: Sequence[Piece]) -> list[Event]:
        """Take in the next pieces."""
        out: list[Event] = []
        for piece in settle_thoughts(pieces):
            match piece:
                case ReasoningText(text):
                    out += self._switch(ThinkingBlock)
                    self._texts.append(text)
                    if not self._hides_thinking:
                        out.append(BlockDelta(self._index, ThinkingDelta(text)))
                case ContentText(text):
                    out += self._switch(TextBlock)
                    self._texts.append(text)
                    out.append(BlockDelta(self._index, TextDelta(text)))
                case ToolCallStart(_, call_id, name):
                    out += self._close()
                    out += self._open(ToolUseBlock(call_id, name))
                case ToolCallArguments(_, text):
                    self._texts.append(text)
                    out.append(BlockDelta(self._index, InputDelta(text)))
                case ToolCallEnd(_, is_whole):
                    out += self._close() if is_whole else self._break_off()
        return out

    def finish(self, stop: StopDelta, usage: MessageUsage) -> list[Event]:
        """End the message.

        Args:
            stop: Why.
            usage: Of the whole message.
        """
        out = self._close()
        self._body = replace(self._body, **asdict(stop), usage=usage)
        return [*out, MessageDelta(stop, usage), MessageStop()]

    def _switch(self, kind: type[TextBlock] | type[ThinkingBlock]) -> list[Event]:
        if isinstance(self._block, kind):
            return []
        return [*self._close(), *self._open(kind())]

    def _open(self, block: Block) -> list[Event]:
        self._block = block
        self._texts.clear()
        return [BlockStart(self._index, block)]

    def _close(self) -> list[Event]:
        """End the open block, if there is one."""
        block, self._block = self._block, None
        if block is None:
            return []
        out: list[Event] = []
        text = "".join(self._texts)
        if isinstance(block, TextBlock):
            block = TextBlock(text)
        elif isinstance(block, ToolUseBlock):
            block = replace(block, input=json.loads(text) if text else {})
        else:
            signature = seal_reasoning(text)
            out.append(BlockDelta(self._index, SignatureDelta(signature)))
            block = ThinkingBlock("" if self._hides_thinking else text, signature)
        self._body = replace(self._body, content=[*self._body.content, block])
        return [*out, *self._stop()]

    def _break_off(self) -> list[Event]:
        """End a call whose input is no object: streams have begun to tell it, messages leave it."""
        self._block = None
        return self._stop()

    def _stop(self) -> list[Event]:
        index, self._index = self._index, self._index + 1
        return [BlockStop(index)]
