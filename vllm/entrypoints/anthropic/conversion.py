"""From the content blocks of the Messages API to chat messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm.entrypoints.openai.chat_assembly import ChatAssembler
from vllm.entrypoints.openai.opaque_reasoning import open_reasoning
from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.multimodal.reader import GivenImage
from vllm.multimodal.sources import Origin
from vllm.tokenizers.breakpoints import Breakpoint, read_cache_control
from vllm.tokenizers.given_images import read_image_part
from vllm.tokenizers.tool_calls import read_arguments

MAX_BREAKPOINTS = 4
_ROLES = ("user", "assistant", "system")


@dataclass(frozen=True, slots=True)
class ConvertedChat:
    """A conversation in the chat dialect.

    Attributes:
        messages: Its messages.
        continues: Whether the last one, the assistant's, is to be continued.
        breakpoints: Places that the client marked.
        origins: For each message, the place of the request's that it begins with; -1: the system.
    """

    messages: Sequence[Mapping[str, Any]]
    continues: bool
    breakpoints: Sequence[Breakpoint]
    origins: Sequence[int]


def convert_messages(
    system: Any,
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] = (),
    cache_control: Any = None,
) -> ConvertedChat:
    """Return the chat that a request's blocks spell.

    Args:
        system: A text, a list of text blocks, or None.
        messages: Of the request.
        tools: Of the request, for their marks only.
        cache_control: The request's own mark, which stands behind its last block.

    Raises:
        UserInputError: A message or a block is malformed, or there are too many marks.
        UnsupportedFeatureError: A block holds what is not served, such as a document.
    """
    if not messages:
        raise UserInputError("messages is empty: give at least one message.", "messages")
    converter = _Converter()
    if system is not None:
        converter.add_system("system", system)
        converter.note_origin(-1)
    converter.mark_tools(tools)
    for i, message in enumerate(messages):
        converter.add_message(f"messages[{i}]", message)
        converter.note_origin(i)
    if cache_control is not None:
        converter.mark("cache_control", cache_control)
    return converter.result()


@dataclass(slots=True)
class _Converter:
    """Owns: the chat so far, its marks and the calls that wait for results."""

    chat: ChatAssembler = field(default_factory=ChatAssembler)
    marks: list[Breakpoint] = field(default_factory=list)
    call_ids: set[str] = field(default_factory=set)
    last_role: str = ""
    begins_text: bool = False
    origins: list[int] = field(default_factory=list)

    def note_origin(self, place: int) -> None:
        """Note what the messages that were added since the last call are made of."""
        self.origins += [place] * (len(self.chat.messages) - len(self.origins))

    def result(self) -> ConvertedChat:
        if len(self.marks) > MAX_BREAKPOINTS:
            raise UserInputError(
                f"The request marks {len(self.marks)} places with cache_control: at most "
                f"{MAX_BREAKPOINTS}.",
                "cache_control",
            )
        last = self.chat.messages[-1] if self.chat.messages else {}
        continues = self.last_role == "assistant"
        if continues and last.get("tool_calls"):
            raise UserInputError(
                "The last message ends with tool_use: send the tool_result of every call.",
                "messages",
            )
        if not self.chat.messages:
            raise UserInputError("messages holds no content: give at least a text.", "messages")
        return ConvertedChat(self.chat.messages, continues, tuple(self.marks), tuple(self.origins))

    def mark(self, where: str, value: Any, part: int | None = None) -> None:
        """Note a mark behind what was added last."""
        ttl_s = read_cache_control(value, where)
        self.marks.append(Breakpoint(max(self.chat.last_index, 0), part, ttl_s))

    def mark_tools(self, tools: Sequence[Any]) -> None:
        """Tools are written with the system message: their marks stand behind that."""
        for i, tool in enumerate(tools):
            value = tool.get("cache_control") if isinstance(tool, Mapping) else None
            if value is not None:
                self.mark(f"tools[{i}].cache_control", value)

    def add_system(self, where: str, content: Any) -> None:
        self._add_texts("system", _as_blocks(where, content))

    def add_message(self, where: str, message: Any) -> None:
        if not isinstance(message, Mapping):
            _refuse(where, f"must be an object, not {type(message).__name__}")
        role = message.get("role")
        if role not in _ROLES:
            _refuse(f"{where}.role", f"is {str(role)[:60]!r}: use {', '.join(_ROLES)}")
        blocks = _as_blocks(f"{where}.content", message.get("content"))
        is_next, self.last_role = self.last_role == role, str(role)
        if role == "assistant":
            if not is_next:
                self.chat.end_turn()
            self.begins_text = is_next
            for place, block in blocks:
                self._add_assistant_block(place, block)
            return
        if role == "system":
            self._add_texts("system", blocks)
            return
        self._add_user_blocks(blocks)

    def _add_user_blocks(self, blocks: list[tuple[str, Mapping[str, Any]]]) -> None:
        """Runs of text are messages; tool results stand between them in their order."""
        texts: list[tuple[str, Mapping[str, Any]]] = []
        for place, block in blocks:
            if _kind(place, block) != "tool_result":
                texts.append((place, block))
                continue
            if texts:
                self._add_texts("user", texts)
                texts = []
            self._add_tool_result(place, block)
        if texts:
            self._add_texts("user", texts)

    def _add_texts(self, role: str, blocks: list[tuple[str, Mapping[str, Any]]]) -> None:
        if not blocks:
            return
        parts = [_part_of(place, block, role) for place, block in blocks]
        first = self.chat.add_message(role, parts, joins=role == "user")
        for i, (place, block) in enumerate(blocks, first):
            self._mark_block(place, block, i)

    def _add_tool_result(self, where: str, block: Mapping[str, Any]) -> None:
        call_id = _string(where, block, "tool_use_id")
        if call_id not in self.call_ids:
            _refuse(
                f"{where}.tool_use_id",
                f"is {call_id[:60]!r}: no tool_use block before it has this id",
            )
        blocks = _as_blocks(f"{where}.content", block.get("content") or "")
        parts = [_part_of(place, part, "user") for place, part in blocks] or [""]
        if block.get("is_error") is True:
            is_text = isinstance(parts[0], str)
            parts[:1] = [f"Error: {parts[0]}"] if is_text else ["Error:", parts[0]]
        self.chat.add_tool_result(call_id, parts)
        self._mark_block(where, block, None)

    def _add_assistant_block(self, where: str, block: Mapping[str, Any]) -> None:
        kind = _kind(where, block)
        if kind == "text":
            # Of two messages in a row; blocks of one are one text.
            between = "\n\n" if self.begins_text and self.chat.has_text else ""
            self.begins_text = False
            self.chat.add_text(between + _string(where, block, "text"), continues=True)
        elif kind == "thinking":
            self._add_thinking(where, block)
        elif kind == "redacted_thinking":
            pass  # another model's, which nobody can read
        elif kind == "tool_use":
            arguments = read_arguments(block.get("input"))
            if arguments is None:
                _refuse(f"{where}.input", "must be an object, or the text of what was cut off")
            call_id = _string(where, block, "id")
            self.call_ids.add(call_id)
            self.chat.add_call(call_id, _string(where, block, "name"), arguments)
        else:
            _unsupported(where, kind, "text, thinking or tool_use")
        self._mark_block(where, block, None)

    def _add_thinking(self, where: str, block: Mapping[str, Any]) -> None:
        thinking = _string(where, block, "thinking")
        signature = block.get("signature")
        if not thinking and isinstance(signature, str) and signature:
            # Another model's thinking cannot be read, and need not be.
            thinking = open_reasoning(signature) or ""
        if thinking:
            self.chat.add_reasoning(thinking)

    def _mark_block(self, where: str, block: Mapping[str, Any], part: int | None) -> None:
        value = block.get("cache_control")
        if value is not None:
            self.mark(f"{where}.cache_control", value, part)


def _as_blocks(where: str, content: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content, each with what to call it in an error."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of blocks")
    blocks: list[tuple[str, Mapping[str, Any]]] = []
    for i, block in enumerate(content):
        if not isinstance(block, Mapping):
            _refuse(f"{where}[{i}]", "must be an object with a type")
        blocks.append((f"{where}[{i}]", block))
    return blocks


def _kind(where: str, block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if not isinstance(kind, str):
        _refuse(f"{where}.type", "must be a string")
    return str(kind)


def _part_of(where: str, block: Mapping[str, Any], role: str) -> str | GivenImage:
    kind = _kind(where, block)
    if kind == "image" and role == "user":
        return _image_of(where, block)
    if kind != "text":
        _unsupported(where, kind, "text or image" if role == "user" else "text")
    return _string(where, block, "text")


def _image_of(where: str, block: Mapping[str, Any]) -> GivenImage:
    """A picture; its media type is not asked, as its bytes say it."""
    source = block.get("source")
    if not isinstance(source, Mapping):
        _refuse(f"{where}.source", "must be an object with a type")
    kind = source.get("type")
    if kind == "base64":
        return GivenImage(where, Origin(data=_string(f"{where}.source", source, "data")))
    if kind == "url":
        url = {"type": "image_url", "image_url": _string(f"{where}.source", source, "url")}
        return read_image_part(where, url)
    if kind == "file":
        _refuse(f"{where}.source", "names a stored file, and none are stored for pictures")
    _refuse(f"{where}.source.type", f"is {str(kind)[:60]!r}: use base64 or url")


def _string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        _refuse(f"{where}.{name}", "must be a string")
    return str(value)


def _unsupported(where: str, kind: str, known: str) -> NoReturn:
    raise UnsupportedFeatureError(
        f"{where} has type {kind[:60]!r}, which is not supported here: use {known}.", "messages"
    )


def _refuse(where: str, why: str) -> NoReturn:
    raise UserInputError(f"{where} {why}.", "messages")
