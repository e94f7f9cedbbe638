"""Gemma 4's prompts, for checkpoints and GGUF files that carry no template.

A prompt is one line of turns, and what a model does between two questions is one turn:

    <bos><|turn>system\\n <|think|>\\n text <|tool>...<tool|> <turn|>\\n
    <|turn>user\\n text <turn|>\\n
    <|turn>model\\n <|channel>thought\\n reasoning \\n<channel|>
        <|tool_call>...<tool_call|> <|tool_response>...<tool_response|>  text <turn|>\\n
    <|turn>model\\n                                                      generation prompt

Results stand behind their calls inside the model's turn, so a prompt that ends with results opens
no turn: the model goes on, with thinking on inside its reasoning. Reasoning is shown behind the
last question only (``preserve_thinking``: of all messages with calls). Results of calls that the
message before them does not make are left out. ``gemma4_tools`` has the tools' spelling.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UserInputError
from vllm.tokenizers.billing_line import leave_out_billing_line
from vllm.tokenizers.chat_messages import (
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    Part,
    check_options,
    find_part_ends,
    join_texts,
    parse_messages,
)
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.fitted_messages import put_results_first
from vllm.tokenizers.gemma4_tools import spell_call, spell_result, spell_tool
from vllm.tokenizers.guarded_messages import guard_messages
from vllm.tokenizers.literal_text import LiteralText
from vllm.tokenizers.tokenizer import Tokenizer

TURN, TURN_END = "<|turn>", "<turn|>\n"
THOUGHT, THOUGHT_END = "<|channel>thought\n", "\n<channel|>"
THINK = "<|think|>\n"
RESULTS = "<|tool_response>"
IMAGE = "<|image|>"
_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
# Without these a vocabulary is not Gemma 4's.
_MARKS = ("<|turn>", "<turn|>")
_THINKING_SWITCHES = ("thinking", "enable_thinking")
_KEEPS_THOUGHTS = "preserve_thinking"


@dataclass(frozen=True, slots=True)
class _Format:
    """What a request says about its prompt.

    Attributes:
        thinks: Whether the model is asked to reason.
        keeps_thoughts: Whether messages with calls before the last question keep their reasoning.
        is_open: Whether the last message is left open, to be continued.
        adds_prompt: Whether the model's turn is opened at the end.
    """

    thinks: bool
    keeps_thoughts: bool
    is_open: bool
    adds_prompt: bool


class Gemma4ChatEncoder:
    """Encodes chats for Gemma 4.

    Args:
        tokenizer: The checkpoint's; its special tokens are found by their spelling.
        literal_text: Keeps special tokens in messages text; None: they become special.
        keeps_billing_line: Whether prompts keep the line of ``billing_line``.
    """

    ignores_tools = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        literal_text: LiteralText | None = None,
        *,
        keeps_billing_line: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._openers = {tokenizer.special_token_id(_MARKS[0])}
        self._literal_text = literal_text
        self._keeps_billing_line = keeps_billing_line
        self._bos = tokenizer.template_tokens.get("bos_token", "")

    def image_roles(self, marker: str) -> frozenset[str]:
        """See ChatEncoder: results of calls are texts."""
        return frozenset(("user", "assistant") if marker == IMAGE else ())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> ChatPrompt:
        """Return the prompt of ``messages``; see ChatEncoder."""
        parsed = parse_messages(messages)
        check_options(options, parsed)
        placed, has_line = leave_out_billing_line(enumerate(parsed), self._keeps_billing_line)
        parsed = [message for _, message in placed]
        # The format shows results right behind their calls, and no others.
        parsed = [parsed[i] for i in put_results_first(parsed)]
        guarded = guard_messages(self._literal_text, parsed, options.tools)
        text = self._bos + render(guarded.messages, guarded.tools, _read_format(options))
        encoded = guarded.encode(self._tokenizer, text, options)
        text, token_ids = encoded.text, encoded.token_ids
        return ChatPrompt(
            text,
            token_ids,
            image_offsets=encoded.image_offsets,
            in_reasoning=_is_in_reasoning(text, parsed, options),
            part_ends=find_part_ends(token_ids, self._openers),
            left_out_billing_line=has_line,
        )


def is_gemma4(checkpoint_config: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Return whether a checkpoint speaks Gemma 4's format: by its type and its vocabulary."""
    is_named = str(checkpoint_config.get("model_type")).startswith("gemma4")
    return is_named and all(tokenizer.token_to_id(mark) is not None for mark in _MARKS)


def render(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], form: _Format) -> str:
    """Return the prompt text of checked messages, without the token that begins it."""
    pieces = []
    system = messages[0] if messages[0].role == "system" else None
    if form.thinks or tools or system is not None:
        pieces += [TURN, "system\n", THINK if form.thinks else "", _system_text(system)]
        pieces += [*map(spell_tool, tools), TURN_END]
    messages = messages if system is None else messages[1:]
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    speakers = [i for i, m in enumerate(messages) if m.role != "tool"]
    ends_in_calls = False
    for number, i in enumerate(speakers):
        message = messages[i]
        before = messages[speakers[number - 1]].role if number else None
        after = messages[speakers[number + 1]].role if number + 1 < len(speakers) else None
        is_model = message.role == "assistant"
        if not (is_model and before == "assistant"):
            pieces += [TURN, "model" if is_model else message.role, "\n"]
        if i > last_user or (form.keeps_thoughts and message.tool_calls):
            pieces.append(_thought(message, is_open=form.is_open and after is None))
        pieces += [spell_call(call) for call in message.tool_calls]
        results = list(_find_results(messages, i)) if message.tool_calls else []
        pieces += [spell_result(name, text) for name, text in results]
        text = _said(message) if is_model else "".join(map(_trimmed, _parts(message)))
        pieces.append(text)
        ends_in_calls = bool(message.tool_calls)
        pieces.append(_find_end(message, after, bool(results), bool(text), form))
    if form.adds_prompt:
        if not ends_in_calls:
            pieces += [TURN, "model\n"]
        elif results and form.thinks:
            pieces.append(THOUGHT)
    return "".join(pieces)


def _find_end(
    message: ChatMessage, after: str | None, has_results: bool, has_text: bool, form: _Format
) -> str:
    """Return what stands behind a message: the end of its turn, unless the turn goes on."""
    if message.tool_calls and not has_results:
        return RESULTS
    if after is None and (form.is_open or (has_results and not has_text)):
        return ""
    goes_on = message.role == "assistant" and after == "assistant"
    return "" if goes_on else TURN_END


def _find_results(messages: Sequence[ChatMessage], i: int) -> Iterator[tuple[str, str]]:
    """Yield the results that stand behind message ``i``, with the names of their functions."""
    names = {call.id: call.name for call in messages[i].tool_calls}
    for message in messages[i + 1 :]:
        if message.role != "tool":
            return
        name = names.get(message.tool_call_id, message.name or "unknown")
        yield name, join_texts(_parts(message), "")


def _trimmed(part: Part) -> str:
    return part.strip() if isinstance(part, str) else IMAGE


def _parts(message: ChatMessage) -> tuple[Part, ...]:
    return (message.content,) if message.parts is None else message.parts


def _system_text(message: ChatMessage | None) -> str:
    if message is None:
        return ""
    if message.parts is None:
        return message.content.strip()
    return "".join(part.strip() + " " for part in message.parts if isinstance(part, str))


def _said(message: ChatMessage) -> str:
    """Return a model's words without thoughts that a client left in them."""
    pieces = []
    for part in _parts(message):
        if not isinstance(part, str):
            pieces.append(IMAGE)
            continue
        split = part.split(_CHANNEL_END)
        pieces.append("".join(text.partition(_CHANNEL)[0] for text in split).strip())
    return "".join(pieces)


def _thought(message: ChatMessage, *, is_open: bool) -> str:
    if not message.reasoning:
        return ""
    # Nothing said yet: it is the reasoning that is to be continued.
    stays_open = is_open and not message.content
    return THOUGHT + message.reasoning + ("" if stays_open else THOUGHT_END)


def _is_in_reasoning(text: str, messages: Sequence[ChatMessage], options: ChatOptions) -> bool:
    if options.continue_final_message:
        return bool(messages[-1].reasoning) and not messages[-1].content
    return options.add_generation_prompt and text.endswith(THOUGHT)


def _read_format(options: ChatOptions) -> _Format:
    """Return what a request says of its prompt; the model thinks only where it is asked to.

    Raises:
        UserInputError: An unknown argument, or one that is no truth value.
    """
    given = options.template_kwargs
    known = (*_THINKING_SWITCHES, _KEEPS_THOUGHTS)
    for name, value in given.items():
        if name not in known:
            raise UserInputError(
                f"chat_template_kwargs holds {name!r}, which Gemma 4's prompt format does not "
                f"know: use {', '.join(known)}.",
                "chat_template_kwargs",
            )
        if value is not None and not isinstance(value, bool):
            raise UserInputError(
                f"chat_template_kwargs.{name}={value!r} must be true or false.",
                "chat_template_kwargs",
            )
    asked = [given[name] for name in _THINKING_SWITCHES if given.get(name) is not None]
    return _Format(
        thinks=bool(asked) and all(asked) and options.reasoning_effort != "none",
        keeps_thoughts=bool(given.get(_KEEPS_THOUGHTS)),
        is_open=options.continue_final_message,
        adds_prompt=options.add_generation_prompt,
    )
