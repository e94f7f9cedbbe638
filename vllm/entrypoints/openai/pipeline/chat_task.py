"""A chat as every API asks for it, ready for the engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.prompts import TokenizedPrompt
from vllm.exceptions import UserInputError
from vllm.parser.forced_calls import forced_calls
from vllm.parser.interface import ParseOptions, ResponseParser, ToolUse
from vllm.parser.registry import NONE
from vllm.sampling_params import ReasoningSpan, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import ChatEncoder, ChatOptions, ChatPrompt
from vllm.tokenizers.breakpoints import Breakpoint, find_breakpoints
from vllm.tokenizers.chat_tools import NO_TOOLS, ToolChoice, ToolSpec


@dataclass(frozen=True, slots=True)
class ChatTask:
    """What a client asks of the model, whatever the API.

    Attributes:
        messages: In the chat dialect: roles system, developer, user, assistant (``content``,
            ``reasoning``, ``tool_calls``) and tool (``tool_call_id``, ``content``).
        options: Of the prompt; the tools are added here.
        tools: Checked; see ``parse_tools``.
        tool_choice: Checked; see ``parse_tool_choice``.
        parallel_tool_calls: Whether an answer may hold several calls.
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
        adapt_params: Completes sampling parameters in place: where the reasoning ends, the grammar
            of calls that must be made, which special tokens the reader must see.
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
    parsers = context.parsers
    may_call = bool(task.tools) and task.tool_choice.mode != "none"
    if may_call and parsers.tools == NONE:
        raise UserInputError(
            "tools cannot be served: how this model writes calls is not known. Start the server "
            "with --tool-call-parser, or leave tools out.",
            "tools",
        )
    # With "none" the model is not even told: prompts that say "do not" still tempt.
    options = replace(task.options, tools=task.tools if may_call else ())
    task = replace(task, options=options)
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
        make_parser=partial(parsers.make_parser, parse_options),
        adapt_params=partial(_adapt_params, context, task, prompt.in_reasoning),
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


def _adapt_params(
    context: ServingContext, task: ChatTask, in_reasoning: bool, params: SamplingParams
) -> SamplingParams:
    """Mutates: params."""
    if context.parsers.is_harmony:
        params.skip_special_tokens = False
    end = context.parsers.reasoning_end
    if in_reasoning and end is not None:
        token_id = context.tokenizer.token_to_id(end)
        ids = [token_id] if token_id is not None else context.tokenizer.encode(end, False)
        params.reasoning = ReasoningSpan(end_token_ids=ids)
    if task.tool_choice.is_forced:
        params.structured_outputs = _forced_calls(context, task, in_reasoning, params)
    return params


def _forced_calls(
    context: ServingContext, task: ChatTask, in_reasoning: bool, params: SamplingParams
) -> StructuredOutputsParams:
    choice = task.tool_choice
    if params.structured_outputs is not None:
        raise UserInputError(
            "A response format and a tool_choice that forces a call exclude each other: give one.",
            "tool_choice",
        )
    tools = [tool for tool in task.tools if choice.name is None or tool.name == choice.name]
    one_call = choice.name is not None or not task.parallel_tool_calls
    tag = forced_calls(context.parsers.tools, tools, one_call, in_reasoning)
    return StructuredOutputsParams(structural_tag=tag)
