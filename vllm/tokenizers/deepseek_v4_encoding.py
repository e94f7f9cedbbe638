"""The prompt format of DeepSeek-V4, which its releases define in code and not as a template.

A prompt is one line of turns; nothing stands between them:

    <bos> system text
    <｜User｜> text  <｜Assistant｜><think> reasoning </think> answer <eos>      thinking
    <｜User｜> text  <｜Assistant｜></think> answer <eos>                        chat
    <｜User｜> text  <｜Assistant｜><think>                                     generation prompt

With thinking on, the reasoning of turns before the last user message is dropped, and those turns
are opened with ``</think>`` like a chat's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.tokenizers.chat_messages import (
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    check_effort,
    check_options,
    find_part_ends,
    parse_messages,
)
from vllm.tokenizers.guarded_messages import guard_messages
from vllm.tokenizers.literal_text import LiteralText
from vllm.tokenizers.tokenizer import Tokenizer

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"

_THINKING_SWITCHES = ("thinking", "enable_thinking")
_EFFORT_KWARG = "reasoning_effort"
# These put a text before the first message which we do not know word for word; answering without it
# would pass less effort off as more.
_EFFORTS_WITH_PREFIX = ("high", "xhigh", "max")


class DeepseekV4ChatEncoder:
    """Encodes chats for DeepSeek-V4.

    Args:
        tokenizer: The checkpoint's; its special tokens are found by their spelling.
        literal_text: Keeps special tokens in messages text; None: they become special.

    Raises:
        ConfigError: The tokenizer lacks one of the format's special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, literal_text: LiteralText | None = None) -> None:
        for token in (BOS, EOS, USER, ASSISTANT, THINK_START, THINK_END):
            tokenizer.special_token_id(token)
        self._tokenizer = tokenizer
        self._openers = {tokenizer.special_token_id(token) for token in (USER, ASSISTANT)}
        self._literal_text = literal_text

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> ChatPrompt:
        """Return the prompt of ``messages``; see ChatEncoder."""
        parsed = parse_messages(messages)
        check_options(options, parsed)
        thinking = resolve_thinking(options)
        guarded = guard_messages(self._literal_text, parsed)
        text = render(
            guarded.messages,
            thinking=thinking,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        text, token_ids = guarded.encode(self._tokenizer, text, options.add_special_tokens)
        continues_reasoning = options.continue_final_message and not parsed[-1].content
        return ChatPrompt(
            text,
            token_ids,
            in_reasoning=thinking and (options.add_generation_prompt or continues_reasoning),
            part_ends=find_part_ends(token_ids, self._openers),
        )


def resolve_thinking(options: ChatOptions) -> bool:
    """Return whether the answer starts with reasoning: yes, unless the request turns it off.

    Raises:
        UserInputError: An unknown template argument, or one of the wrong type.
        UnsupportedFeatureError: An effort whose prompt text is unknown.
    """
    kwargs = options.template_kwargs
    unknown = sorted(set(kwargs) - {*_THINKING_SWITCHES, _EFFORT_KWARG})
    if unknown:
        raise UserInputError(
            f"chat_template_kwargs holds {', '.join(map(repr, unknown))}, which DeepSeek-V4's "
            f"prompt format does not know: use {', '.join(_THINKING_SWITCHES)} or {_EFFORT_KWARG}.",
            "chat_template_kwargs",
        )
    thinking = True
    for name in _THINKING_SWITCHES:
        value = kwargs.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserInputError(
                f"chat_template_kwargs.{name}={value!r} must be true or false.",
                "chat_template_kwargs",
            )
        thinking = thinking and value is not False
    effort = options.reasoning_effort
    if effort is None:
        effort = kwargs.get(_EFFORT_KWARG)
        check_effort(effort)
    if effort in _EFFORTS_WITH_PREFIX:
        raise UnsupportedFeatureError(
            f"reasoning_effort={effort!r} is not supported yet: use none, minimal, low or medium.",
            "reasoning_effort",
        )
    return thinking and effort != "none"


def render(
    messages: Sequence[ChatMessage],
    *,
    thinking: bool,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt text of checked messages.

    Args:
        messages: At least one.
        thinking: Whether the model reasons before it answers.
        add_generation_prompt: Whether to open an assistant turn at the end.
        continue_final_message: Whether the last message, an assistant's, is left open.
    """
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    pieces = [BOS]
    for i, message in enumerate(messages):
        if message.role == "system":
            pieces.append(message.content)
        elif message.role == "user":
            # Consecutive user messages are one turn.
            merges = i > 0 and messages[i - 1].role == "user"
            pieces.append(("\n\n" if merges else USER) + message.content)
        else:
            is_open = continue_final_message and i == len(messages) - 1
            pieces.append(_assistant_turn(message, thinking and i > last_user, is_open))
    if add_generation_prompt:
        pieces.append(ASSISTANT + (THINK_START if thinking else THINK_END))
    return "".join(pieces)


def _assistant_turn(message: ChatMessage, with_reasoning: bool, is_open: bool) -> str:
    end = "" if is_open else EOS
    if not with_reasoning:
        return ASSISTANT + THINK_END + message.content + end
    opening = ASSISTANT + THINK_START + message.reasoning
    if is_open and not message.content:
        return opening  # it is the reasoning that is to be continued
    return opening + THINK_END + message.content + end
