"""A chat as every API asks for it, ready for the engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.prompts import TokenizedPrompt
from vllm.parser.interface import ParseOptions, ResponseParser, ToolUse
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import ChatEncoder, ChatOptions, ChatPrompt
from vllm.tokenizers.breakpoints import Breakpoint, find_breakpoints
from vllm.tokenizers.chat_tools import NO_TOOLS, ToolChoice, ToolSpec


@dataclass(frozen=True, slots=True)
class ChatTask:
    """What a client asks of the model, whatever the API.

    Attributes:
        messages: In the chat dialect: roles system, developer, user, assistant (``content``,
            ``reasoning``, ``tool_calls``) and tool (``tool_call_id``, ``content``).
        tools: Checked; see ``parse_tools``.
        tool_choice: Checked; see ``parse_tool_choice``.
        parallel_tool_calls: Whether an answer may hold several calls.
        options: Of the prompt; the tools are added here.
        breakpoints: Places that the client marked as worth keeping.
    """

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = NO_TOOLS
    parallel_tool_calls: bool = True
    breakpoints: Sequence[Breakpoint] = ()


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that was rendered.

    Attributes:
        prompt: For the engine.
        in_reasoning: Whether the answer begins inside the reasoning.
        make_parser: Makes the reader of one answer; every answer (``n``) needs its own.
        adapt_params: Completes sampling parameters: the grammar of forced calls, special tokens.
    """

    prompt: TokenizedPrompt
    in_reasoning: bool
    make_parser: Callable[[], ResponseParser]
    adapt_params: Callable[[SamplingParams], SamplingParams]


async def prepare_chat(task: ChatTask, context: ServingContext) -> PreparedChat:
    """Render and tokenise a chat, in a thread: templates are programs and texts are long.

    Raises:
        UserInputError: A message, tool or option is wrong.
    """
    prompt, marked = await asyncio.to_thread(_encode, task, context.chat_encoder)
    parse_options = ParseOptions(
        in_reasoning=prompt.in_reasoning,
        tools=task.tools,
        tool_use=_tool_use(task),
        one_call=not task.parallel_tool_calls,
    )
    return PreparedChat(
        prompt=TokenizedPrompt(prompt.token_ids, prompt.text, prompt.part_ends).with_breakpoints(
            marked
        ),
        in_reasoning=prompt.in_reasoning,
        make_parser=lambda: context.parsers.make_parser(parse_options),
        adapt_params=lambda params: params,
    )


def _encode(task: ChatTask, encoder: ChatEncoder) -> tuple[ChatPrompt, Mapping[int, float | None]]:
    """The prompt, and its marked places in tokens."""
    prompt = encoder.encode_chat(task.messages, task.options)
    if not task.breakpoints:
        return prompt, {}
    marked = find_breakpoints(encoder, task.messages, task.options, prompt, task.breakpoints)
    return prompt, marked


def _tool_use(task: ChatTask) -> ToolUse:
    if not task.tools:
        return ToolUse.OFF
    return ToolUse.DROP if task.tool_choice.mode == "none" else ToolUse.PARSE
