"""What a chat encoder takes and gives, and the one check of a chat's messages."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from vllm.exceptions import ContextLengthError, UnsupportedFeatureError, UserInputError
from vllm.multimodal.families import ImageText
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.tool_calls import MessageCall, parse_calls

Role = Literal["system", "user", "assistant", "tool"]
# What clients call "developer" is what models know as the system prompt.
_ROLES: tuple[str, ...] = (*get_args(Role), "developer")
# Whose texts every template shows.
_SHOWN_ROLES = ("system", "developer", "user")
_UNSUPPORTED_ROLES = ("function", "latest_reminder")
# Known fields of a message whose meaning would be lost if we rendered the message without them.
_UNSUPPORTED_MESSAGE_FIELDS = (
    "function_call",
    "tools",
    "response_format",
    "task",
    "audio",
)
# Ends of a chat's parts that are told to the cache: in all, and of its beginning.
_MAX_PART_ENDS = 16
NUM_SHARED_ENDS = 2
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class PromptCut:
    """A place in prompts that is tokenised from both sides: tokens before it are everywhere equal.

    Prompts that begin alike are thus tokenised once as far as that, and none of them depends on
    how another goes on.

    Owns: the tokens of what stood before the mark last.

    Args:
        mark: A character in a message, where the prompt is cut; it is no part of the prompt.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._head: tuple[str, list[int]] | None = None

    @property
    def num_head_tokens(self) -> int:
        """Tokens before the place, in the prompt made last; 0: the mark did not stand in it."""
        return 0 if self._head is None else len(self._head[1])

    def encode(
        self,
        rendered: str,
        encode: Callable[[str], list[int]],
        encode_rest: Callable[[str], list[int]],
    ) -> list[int]:
        """Return the tokens of a prompt.

        Args:
            rendered: Its text, with the mark.
            encode: Tokenises the beginning of a prompt, or a whole one.
            encode_rest: Tokenises what follows.
        """
        head, mark, rest = rendered.rpartition(self.mark)
        if not mark:
            self._head = None
            return encode(rendered)
        if self._head is None or self._head[0] != head:
            self._head = head, encode(head)
        return self._head[1] + encode_rest(rest)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Stands in a content's list of parts for a picture, which was read apart.

    No client can spell one: what comes as JSON is no picture here.

    Attributes:
        index: Of the request's pictures, from 0.
        identifier: Its identity: whoever compares messages compares pictures.
    """

    index: int
    identifier: str = ""


Part = str | ImageRef


@dataclass(frozen=True, slots=True)
class ChatImages:
    """The pictures of a chat, as far as its prompt needs to know them.

    Attributes:
        text: What stands for a picture in a prompt.
        placeholder_id: Token id of a soft token.
        num_tokens: Soft tokens of each picture.
    """

    text: ImageText
    placeholder_id: int
    num_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat request says about its prompt besides the messages.

    Attributes:
        add_generation_prompt: Whether to open an assistant turn at the end.
        continue_final_message: Whether to leave the last (assistant) message open, to be continued.
        reasoning_effort: One of REASONING_EFFORTS; "none" turns thinking off.
        template_kwargs: The request's ``chat_template_kwargs``.
        tools: What the prompt tells the model it may call.
        response_format: The request's response format; only "text" is supported yet.
        add_special_tokens: Whether the tokenizer adds bos although the rendered text carries it.
        max_prompt_tokens: A prompt that cannot have as few is refused before it is tokenised; None:
            none is.
        cut: Where the prompt is tokenised in two; None: nowhere.
        images: What its messages' ``ImageRef`` stand for; None: they have none.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[ToolSpec] = ()
    response_format: Mapping[str, Any] | None = None
    add_special_tokens: bool = False
    max_prompt_tokens: int | None = None
    cut: PromptCut | None = None
    images: ChatImages | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, ready for the model.

    Attributes:
        text: The rendered prompt.
        token_ids: Its tokens.
        in_reasoning: Whether the model's first token belongs to its reasoning.
        has_reasoned: Whether the prompt has closed the reasoning, so that none may follow.
        part_ends: Where system prompt and messages end, in tokens, most likely shared first.
        joined: Which of the request's messages stand in the prompt as one, by their places.
        left_out_billing_line: Whether the system text began with one; see ``billing_line``.
        image_offsets: For each picture in the prompt, in its order there, its index among the
            request's and its first soft token.
    """

    text: str
    token_ids: list[int]
    in_reasoning: bool
    part_ends: tuple[int, ...] = ()
    has_reasoned: bool = False
    joined: tuple[tuple[int, ...], ...] = ()
    left_out_billing_line: bool = False
    image_offsets: tuple[tuple[int, int], ...] = ()


def find_part_ends(token_ids: Sequence[int], openers: Container[int]) -> tuple[int, ...]:
    """Return where parts of a chat end: where the next one's first token stands.

    The first two, which other conversations share, then the last ones, latest first: that is where
    an edit or another answer parts from this conversation.

    Args:
        token_ids: Of the whole chat.
        openers: Tokens that stand at the beginning of a message and nowhere else.
    """
    ends = [i for i, token_id in enumerate(token_ids) if i > 1 and token_id in openers]
    latest_first = ends[NUM_SHARED_ENDS:][::-1]
    return tuple([*ends[:NUM_SHARED_ENDS], *latest_first][:_MAX_PART_ENDS])


class ChatEncoder(Protocol):
    """Turns a chat into the prompt its model was trained on."""

    @property
    def ignores_tools(self) -> bool:
        """Whether the format never tells the model of a tool."""

    def image_roles(self, marker: str) -> frozenset[str]:
        """Return the roles in whose messages the format shows pictures.

        Args:
            marker: What it writes for one.
        """

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> ChatPrompt:
        """Return the prompt of ``messages``.

        Raises:
            UserInputError: A message or an option is wrong.
            UnsupportedFeatureError: One asks for something not served yet.
        """


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One checked message: plain text, and an assistant's reasoning and calls where it has any.

    Attributes:
        content: The text; parts are joined by line breaks.
        parts: Texts and pictures of a content that came as a list; None: it came as one text.
        tool_call_id: Of the call whose result a message of role "tool" brings.
        name: Of the speaker, or of the function whose result it is; None: not said.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[MessageCall, ...] = ()
    tool_call_id: str | None = None
    parts: tuple[Part, ...] | None = None
    name: str | None = None

    @property
    def images(self) -> tuple[int, ...]:
        """Indexes of its pictures, in their order."""
        return tuple(part.index for part in self.parts or () if isinstance(part, ImageRef))


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Check a request's messages and reduce their content to text.

    Raises:
        UserInputError: There are none, or one is malformed.
        UnsupportedFeatureError: One uses a role, field or content type not served yet.
    """
    if not messages:
        raise UserInputError("messages is empty: give at least one message.", "messages")
    return [_parse_message(i, message) for i, message in enumerate(messages)]


def check_unread(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], max_tokens: int | None
) -> None:
    """Refuse a chat whose system and user texts alone cannot fit, before anything is done with it.

    Raises:
        ContextLengthError: They are too long.
    """
    if max_tokens is None:
        return
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") in _SHOWN_ROLES:
            content = message.get("content")
            parts = content if isinstance(content, list) else [content]
            for part in parts:
                text = part.get("text") if isinstance(part, Mapping) else part
                if isinstance(text, str) and len(text) > max_tokens:
                    check_length(tokenizer, text.strip(), max_tokens)


def check_length(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> None:
    """Refuse a text that is too long for any tokens that it may have.

    Raises:
        ContextLengthError: It is.
    """
    if max_tokens is None or len(text) <= max_tokens:
        return
    least = tokenizer.min_tokens(text)
    if least > max_tokens:
        raise ContextLengthError(least, max_tokens + 1, of_messages=True, is_bound=True)


def check_options(
    options: ChatOptions, messages: Sequence[ChatMessage], *, counts_effort: bool = False
) -> None:
    """Refuse what no encoder can honour.

    Args:
        options: Of the request.
        messages: Its messages.
        counts_effort: Whether the format knows efforts as numbers, too.

    Raises:
        UserInputError: The options contradict each other or the messages.
        UnsupportedFeatureError: A response format is asked for.
    """
    format_type = (options.response_format or {}).get("type", "text")
    if format_type != "text":
        raise UnsupportedFeatureError(
            f"response_format of type {format_type!r} is not supported yet: leave it out.",
            "response_format",
        )
    check_effort(options.reasoning_effort, is_counted=counts_effort)
    if not options.continue_final_message:
        return
    if options.add_generation_prompt:
        raise UserInputError(
            "continue_final_message and add_generation_prompt cannot both be true: set "
            "add_generation_prompt to false.",
            "continue_final_message",
        )
    if messages[-1].role != "assistant":
        raise UserInputError(
            "continue_final_message needs a last message of role 'assistant', not "
            f"{messages[-1].role!r}.",
            "continue_final_message",
        )
    if messages[-1].tool_calls:
        raise UserInputError(
            "continue_final_message cannot continue a message with tool_calls: these end it.",
            "continue_final_message",
        )


def check_effort(effort: Any, *, is_counted: bool = False) -> None:
    """Refuse a reasoning effort that has no meaning; None is "not given".

    Args:
        effort: What was given.
        is_counted: Whether numbers from 1 to 100 have one.

    Raises:
        UserInputError: It has none.
    """
    if effort is None or (isinstance(effort, str) and effort in REASONING_EFFORTS):
        return
    if is_counted and count_effort(effort) is not None:
        return
    numbers = ", or a number from 1 to 100" if is_counted else ""
    raise UserInputError(
        f"reasoning_effort={effort!r} is unknown: use one of {', '.join(REASONING_EFFORTS)}"
        f"{numbers}.",
        "reasoning_effort",
    )


def count_effort(effort: Any) -> int | None:
    """Return an effort that is a number from 1 to 100, or its digits; None: it is none."""
    if isinstance(effort, str) and effort.isascii() and effort.isdigit() and len(effort) <= 3:
        effort = int(effort)
    return effort if type(effort) is int and 1 <= effort <= 100 else None


def _parse_message(index: int, message: Mapping[str, Any]) -> ChatMessage:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise UserInputError(
            f"{where} must be an object with role and content, not {type(message).__name__}.",
            "messages",
        )
    role = _parse_role(where, message.get("role"))
    for name in _UNSUPPORTED_MESSAGE_FIELDS:
        if message.get(name):
            raise UnsupportedFeatureError(
                f"{where}.{name} is not supported yet: leave it out.", "messages"
            )
    content = message.get("content")
    if content is None and role != "assistant":
        raise UserInputError(f"{where}.content is missing: give a text.", "messages")
    parsed = _parse_content(f"{where}.content", content)
    text = parsed if isinstance(parsed, str) else join_texts(parsed)
    parts = None if isinstance(parsed, str) else parsed
    speaker = message.get("name")
    if speaker is not None and not isinstance(speaker, str):
        raise UserInputError(f"{where}.name must be a string.", "messages")
    if role == "assistant":
        calls = parse_calls(f"{where}.tool_calls", message.get("tool_calls"))
        thought = _parse_reasoning(where, message)
        return ChatMessage(role, text, thought, calls, parts=parts, name=speaker)
    if message.get("tool_calls"):
        raise UserInputError(f"{where}.tool_calls belongs to role 'assistant'.", "messages")
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise UserInputError(f"{where}.tool_call_id must be a string.", "messages")
    call_id = call_id if role == "tool" else None
    return ChatMessage(role, text, tool_call_id=call_id, parts=parts, name=speaker)


def _parse_reasoning(where: str, message: Mapping[str, Any]) -> str:
    # Clients send back what they were given, under either name.
    given = message.get("reasoning")
    reasoning = given if given is not None else message.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise UserInputError(f"{where}.reasoning must be a string.", "messages")
    return reasoning


def _parse_role(where: str, role: Any) -> Role:
    if role == "developer":
        return "system"
    if role == "system" or role == "user" or role == "assistant" or role == "tool":
        found: Role = role
        return found
    if role in _UNSUPPORTED_ROLES:
        raise UnsupportedFeatureError(
            f"{where}.role={role!r} is not supported yet: use {', '.join(_ROLES)}.", "messages"
        )
    raise UserInputError(f"{where}.role={role!r} is unknown: use {', '.join(_ROLES)}.", "messages")


def join_texts(parts: Iterable[Part], between: str = "\n") -> str:
    """Return the texts of a content's parts as one."""
    return between.join(part for part in parts if isinstance(part, str))


def _parse_content(where: str, content: Any) -> str | tuple[Part, ...]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UserInputError(f"{where} must be a string or a list of parts.", "messages")
    return tuple(_parse_part(f"{where}[{j}]", part) for j, part in enumerate(content))


def _parse_part(where: str, part: Any) -> Part:
    if isinstance(part, str | ImageRef):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise UserInputError(f"{where} must be an object with a type.", "messages")
    kind = part["type"]
    # What a model said when it refused is text too.
    if kind not in ("text", "refusal"):
        raise UnsupportedFeatureError(
            f"{where} has type {kind!r}: only 'text' is supported.", "messages"
        )
    if not isinstance(part.get(kind), str):
        raise UserInputError(f"{where}.{kind} must be a string.", "messages")
    return str(part[kind])
