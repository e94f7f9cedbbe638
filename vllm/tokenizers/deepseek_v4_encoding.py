"""The prompt format of DeepSeek-V4, which its releases define in code and not as a template.

A prompt is one line of turns; nothing stands between them:

    <bos> system text
    <｜User｜> text  <｜Assistant｜><think> reasoning </think> answer <eos>      thinking
    <｜User｜> text  <｜Assistant｜></think> answer <eos>                        chat
    <｜User｜> text  <｜Assistant｜><think>                                     generation prompt

With thinking on, the reasoning of turns before the last user message is dropped, and those turns
are opened with ``</think>`` like a chat's. In a chat with tools nothing is dropped: an agent's
next prompt goes on where the last answer ended. ``deepseek_v4_tools`` has the tools' spelling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vllm.exceptions import UserInputError
from vllm.tokenizers.billing_line import leave_out_billing_line
from vllm.tokenizers.chat_messages import (
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    check_effort,
    check_options,
    find_part_ends,
    join_texts,
    parse_messages,
)
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.deepseek_v4_tools import (
    V4_TAGS,
    DsmlTags,
    calls_block,
    tools_section,
    user_turns,
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
# What stands before the first message when more thought is asked for; the releases' place, our
# wording. Less than "high" is what the model does by itself.
_HIGH_EFFORT = (
    "Reasoning effort: high. Think the problem through step by step, look for what the first idea "
    "misses, and check the result before you answer.\n\n"
)
_MAX_EFFORT = (
    "Reasoning effort: maximum. Take the problem apart completely, follow every branch that could "
    "matter, write the steps out, try to refute your own result, and answer only when nothing is "
    "left open.\n\n"
)
_EFFORT_PREFIX = {"high": _HIGH_EFFORT, "xhigh": _HIGH_EFFORT, "max": _MAX_EFFORT}


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """What releases of the family write differently.

    Attributes:
        name: Of the release.
        tags: Of calls.
        ask_effort: What stands before the first message of a chat with thinking, by the effort
            that was asked for; it is part of a system text that follows.
        system: What opens a system text; empty: nothing.
        turn_roles: Whose turns end the reasoning before them.
        counts_effort: Whether efforts may be numbers.
        part_gap: What stands between the parts of a content.
        thinks: Whether the model thinks where a request does not say.
    """

    name: str
    tags: DsmlTags
    ask_effort: Callable[[str | None], str]
    system: str = ""
    turn_roles: tuple[str, ...] = ("user", "tool")
    counts_effort: bool = False
    part_gap: str = "\n"
    thinks: bool = True


V4_FORMAT = PromptFormat(
    "DeepSeek-V4", V4_TAGS, lambda effort: _EFFORT_PREFIX.get(effort or "", "")
)


class DeepseekV4ChatEncoder:
    """Encodes chats for DeepSeek-V4.

    Args:
        tokenizer: The checkpoint's; its special tokens are found by their spelling.
        literal_text: Keeps special tokens in messages text; None: they become special.
        keeps_billing_line: Whether prompts keep the line of ``billing_line``.

    Raises:
        ConfigError: The tokenizer lacks one of the format's special tokens.
    """

    ignores_tools = False
    format: ClassVar[PromptFormat] = V4_FORMAT
    # Whether a template that lies beside the checkpoint comes first.
    yields_to_template: ClassVar[bool] = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        literal_text: LiteralText | None = None,
        *,
        keeps_billing_line: bool = False,
    ) -> None:
        for token in (BOS, EOS, THINK_START, THINK_END):
            tokenizer.special_token_id(token)
        self._tokenizer = tokenizer
        openers = [USER, ASSISTANT, *([self.format.system] if self.format.system else [])]
        self._openers = {tokenizer.special_token_id(token) for token in openers}
        self._literal_text = literal_text
        self._keeps_billing_line = keeps_billing_line

    def image_roles(self, marker: str) -> frozenset[str]:
        """See ChatEncoder: none."""
        return frozenset()

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> ChatPrompt:
        """Return the prompt of ``messages``; see ChatEncoder."""
        own = self.format
        parsed = [
            message if message.parts is None else _join_parts(message, own.part_gap)
            for message in parse_messages(messages)
        ]
        check_options(options, parsed, counts_effort=own.counts_effort)
        placed, has_line = leave_out_billing_line(enumerate(parsed), self._keeps_billing_line)
        parsed = [message for _, message in placed]
        thinking = resolve_thinking(options, own)
        guarded = guard_messages(self._literal_text, parsed, options.tools)
        text = self.render(
            guarded.messages,
            thinking=thinking,
            tools=guarded.tools,
            effort=resolve_effort(options, own),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        encoded = guarded.encode(self._tokenizer, text, options)
        text, token_ids = encoded.text, encoded.token_ids
        continues_reasoning = options.continue_final_message and not parsed[-1].content
        in_reasoning = thinking and (options.add_generation_prompt or continues_reasoning)
        return ChatPrompt(
            text,
            token_ids,
            in_reasoning=in_reasoning,
            # The format says in every prompt whether the model thinks.
            has_reasoned=not in_reasoning,
            part_ends=find_part_ends(token_ids, self._openers),
            left_out_billing_line=has_line,
        )

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        thinking: bool,
        tools: Sequence[ToolSpec],
        effort: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """Return the prompt text of checked messages; see the function of that name."""
        return render(
            messages,
            thinking=thinking,
            tools=tools,
            effort=effort,
            form=self.format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


def _join_parts(message: ChatMessage, gap: str) -> ChatMessage:
    return replace(message, content=join_texts(message.parts or (), gap))


def resolve_thinking(options: ChatOptions, form: PromptFormat = V4_FORMAT) -> bool:
    """Return whether the answer starts with reasoning: as the release, unless the request says.

    Raises:
        UserInputError: An unknown template argument, or one of the wrong type.
    """
    kwargs = options.template_kwargs
    unknown = sorted(set(kwargs) - {*_THINKING_SWITCHES, _EFFORT_KWARG})
    if unknown:
        raise UserInputError(
            f"chat_template_kwargs holds {', '.join(map(repr, unknown))}, which {form.name}'s "
            f"prompt format does not know: use {', '.join(_THINKING_SWITCHES)} or {_EFFORT_KWARG}.",
            "chat_template_kwargs",
        )
    effort = resolve_effort(options, form)
    said: list[bool] = []
    for name in _THINKING_SWITCHES:
        value = kwargs.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserInputError(
                f"chat_template_kwargs.{name}={value!r} must be true or false.",
                "chat_template_kwargs",
            )
        if value is not None:
            said.append(value)
    thinking = all(said) if said else form.thinks or effort is not None
    return thinking and effort != "none"


def resolve_effort(options: ChatOptions, form: PromptFormat = V4_FORMAT) -> str | None:
    """Return the reasoning effort that a request asks for, wherever it says so.

    Raises:
        UserInputError: It is unknown.
    """
    effort = options.reasoning_effort
    if effort is None:
        effort = options.template_kwargs.get(_EFFORT_KWARG)
        check_effort(effort, is_counted=form.counts_effort)
    return None if effort is None else str(effort)


def render(
    messages: Sequence[ChatMessage],
    *,
    thinking: bool,
    tools: Sequence[ToolSpec] = (),
    effort: str | None = None,
    form: PromptFormat = V4_FORMAT,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt text of checked messages.

    Args:
        messages: At least one.
        thinking: Whether the model reasons before it answers.
        tools: What it may call.
        effort: How much it should reason; None: as it does by itself.
        form: Of the release.
        add_generation_prompt: Whether to open an assistant turn at the end.
        continue_final_message: Whether the last message, an assistant's, is left open.
    """
    keeps_reasoning = bool(tools) or any(m.tool_calls for m in messages)
    turns = user_turns(add_tools(messages, tools_section(tools, form.tags)))
    last_user = max((i for i, m in enumerate(turns) if m.role in form.turn_roles), default=-1)
    asked = form.ask_effort(effort) if thinking else ""
    pieces = [BOS, form.system + asked if asked else ""]
    for i, turn in enumerate(turns):
        if turn.role == "system":
            is_opened = bool(asked) and i == 0
            pieces.append(("" if is_opened else form.system) + turn.content)
        elif turn.role in ("user", "tool"):
            pieces.append(USER + turn.content)
        else:
            is_open = continue_final_message and i == len(turns) - 1
            with_reasoning = thinking and (keeps_reasoning or i > last_user)
            pieces.append(_assistant_turn(turn, with_reasoning, is_open, form.tags))
    if add_generation_prompt:
        pieces.append(ASSISTANT + (THINK_START if thinking else THINK_END))
    return "".join(pieces)


def add_tools(messages: Sequence[ChatMessage], section: str) -> list[ChatMessage]:
    """Return messages with the tools behind the first system text, which there is then anyway."""
    at = next((i for i, m in enumerate(messages) if m.role == "system"), None)
    if not section:
        return list(messages)
    if at is None:
        return [ChatMessage("system", section), *messages]
    system = replace(messages[at], content=messages[at].content + section)
    return [*messages[:at], system, *messages[at + 1 :]]


def _assistant_turn(
    message: ChatMessage, with_reasoning: bool, is_open: bool, tags: DsmlTags
) -> str:
    end = calls_block(message.tool_calls, tags) + ("" if is_open else EOS)
    if not with_reasoning:
        return ASSISTANT + THINK_END + message.content + end
    opening = ASSISTANT + THINK_START + message.reasoning
    if is_open and not message.content:
        return opening  # it is the reasoning that is to be continued
    return opening + THINK_END + message.content + end
