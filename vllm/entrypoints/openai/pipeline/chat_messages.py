"""Pieces in the chat dialect: a message, or what is new of one."""

from collections.abc import Iterable

from vllm.entrypoints.openai.protocol.responses import (
    ChatDelta,
    ChatMessageBody,
    FunctionCall,
    ToolCallBody,
    ToolCallDelta,
)
from vllm.parser.pieces import (
    ContentText,
    ParsedAnswer,
    Piece,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
    settle_thoughts,
)


def chat_message(answer: ParsedAnswer, with_reasoning: bool) -> ChatMessageBody:
    """Return the message of a whole answer."""
    message = ChatMessageBody(answer.content)
    if answer.reasoning and with_reasoning:
        message.reasoning = message.reasoning_content = answer.reasoning
    if answer.tool_calls:
        message.content = answer.content or None
        message.tool_calls = [
            ToolCallBody(call.id, FunctionCall(call.name, call.arguments))
            for call in answer.tool_calls
        ]
    return message


def chat_deltas(pieces: Iterable[Piece], with_reasoning: bool) -> list[ChatDelta]:
    """Return what is new of a message, in as few deltas as keep the order; none for nothing."""
    deltas: list[ChatDelta] = []
    for piece in settle_thoughts(list(pieces)):
        match piece:
            case ReasoningText(text):
                if with_reasoning:
                    deltas.append(ChatDelta(reasoning=text, reasoning_content=text))
            case ContentText(text):
                deltas.append(ChatDelta(content=text))
            case ToolCallStart(index, call_id, name):
                named = FunctionCall(name, "")
                call = ToolCallDelta(index, named, id=call_id, type="function")
                deltas.append(ChatDelta(tool_calls=[call]))
            case ToolCallArguments(index, text):
                more = ToolCallDelta(index, FunctionCall(arguments=text))
                deltas.append(ChatDelta(tool_calls=[more]))
    return deltas
