"""Checked messages and tools whose special tokens are marked, on their way through rendering."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.tokenizers.chat_messages import ChatMessage, ChatOptions, Part, check_length
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.image_markers import expand_markers, find_offsets
from vllm.tokenizers.literal_text import LiteralText
from vllm.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A prompt: its text, its tokens, and its pictures as ``ChatPrompt.image_offsets``."""

    text: str
    token_ids: list[int]
    image_offsets: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GuardedMessages:
    """Messages to render.

    Attributes:
        messages: Their special tokens marked.
        tools: Likewise.
        mark: The mark; None where there is none.
        literal_text: What marked them; None: special tokens in messages become special.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[ToolSpec]
    mark: str | None
    literal_text: LiteralText | None

    def encode(self, tokenizer: Tokenizer, rendered: str, options: ChatOptions) -> "EncodedText":
        """Return the rendered text without marks, and its tokens.

        Raises:
            UserInputError: The text cannot be tokenised, or shows other pictures than the messages.
            ContextLengthError: It is longer than the options allow.
        """
        order = [index for message in self.messages for index in message.images]
        images = options.images
        if images is not None:
            counts = [images.num_tokens[index] for index in order]
            rendered = expand_markers(rendered, images.text, counts)
        check_length(tokenizer, rendered, options.max_prompt_tokens)
        encode = partial(self._encode, tokenizer, options.add_special_tokens)
        cut = options.cut
        if cut is None:
            token_ids = encode(rendered)
        else:
            token_ids = cut.encode(rendered, encode, partial(self._encode, tokenizer, False))
            rendered = rendered.replace(cut.mark, "")
        text = rendered if self.mark is None else rendered.replace(self.mark, "")
        if images is None:
            return EncodedText(text, token_ids)
        offsets = find_offsets(token_ids, images.placeholder_id, counts)
        return EncodedText(text, token_ids, tuple(zip(order, offsets, strict=True)))

    def _encode(self, tokenizer: Tokenizer, add_special_tokens: bool, text: str) -> list[int]:
        if self.literal_text is None or self.mark is None:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self.literal_text.encode(text, self.mark, add_special_tokens)


def guard_messages(
    literal_text: LiteralText | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSpec] = (),
) -> GuardedMessages:
    """Mark the special tokens in what clients wrote; without ``literal_text`` nothing is marked."""
    if literal_text is None:
        return GuardedMessages(messages, tools, None, None)
    mark = literal_text.find_mark(_texts(messages, tools))
    if mark is None:
        return GuardedMessages(messages, tools, None, literal_text)
    found: str = mark

    def guard(text: str) -> str:
        return literal_text.guard(text, found)

    guarded = [_map_message(message, guard) for message in messages]
    guarded_tools = [
        ToolSpec(tool.name, _map_texts(tool.function, guard), tool.parameters) for tool in tools
    ]
    return GuardedMessages(guarded, guarded_tools, mark, literal_text)


def _texts(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Iterator[str]:
    for message in messages:
        yield message.content
        yield message.name or ""
        yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield call.arguments
    for tool in tools:
        yield json.dumps(tool.function, ensure_ascii=False)


def _map_message(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    calls = tuple(
        replace(call, name=change(call.name), arguments=change(call.arguments))
        for call in message.tool_calls
    )
    return replace(
        message,
        content=change(message.content),
        parts=None if message.parts is None else tuple(_map_part(p, change) for p in message.parts),
        name=None if message.name is None else change(message.name),
        reasoning=change(message.reasoning),
        tool_calls=calls,
    )


def _map_part(part: Part, change: Callable[[str], str]) -> Part:
    return change(part) if isinstance(part, str) else part


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same JSON value with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_map_texts(entry, change) for entry in value]
    return value
