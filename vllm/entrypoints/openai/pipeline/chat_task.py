"""A chat as every API asks for it, ready for the engine."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.field_names import fields_named
from vllm.entrypoints.openai.pipeline.images import read_pictures
from vllm.entrypoints.openai.prompts import TokenizedPrompt
from vllm.entrypoints.openai.protocol.requests import SamplingRequest
from vllm.entrypoints.openai.structured_fields import asks_for_tag, find_structured_field
from vllm.entrypoints.openai.text_workers import count_chars
from vllm.exceptions import UserInputError
from vllm.inputs import MAX_CACHE_BOUNDARIES
from vllm.multimodal.reader import ReadImage
from vllm.parser.call_ids import with_own_ids
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.grammar_formats import ANSWER_PART, TOOLS_PART, Format, any_of, json_of, text
from vllm.parser.interface import ParseOptions, ResponseParser, ToolUse, accepts_any_id
from vllm.parser.registry import NONE, TOOL_PARSERS
from vllm.parser.thought_ends import call_marks, spell_marks
from vllm.sampling_params import ReasoningSpan, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import ChatEncoder, ChatOptions, ChatPrompt
from vllm.tokenizers.breakpoints import Breakpoint, find_breakpoints
from vllm.tokenizers.chat_messages import NUM_SHARED_ENDS, check_unread
from vllm.tokenizers.chat_tools import NO_TOOLS, ToolChoice, ToolSpec
from vllm.v1.structured_output.limits import read_schema

# Ends and beginnings of pictures that are told to the cache.
_MAX_IMAGE_ENDS = 8


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
        has_form: Whether the request says what form the answer has.
        call_id_form: Pattern of the ids of calls that the API takes; empty: it takes any.
        origins: For each message, the place among the API's own of what it is made of; -1: it has
            none. Empty: the messages are the API's own.
        num_entries: Of the API's own messages or items; None: as many as there are messages.
        image_settings: The request's ``mm_processor_kwargs``.
        moves_images: Whether pictures in results of calls may go into a question behind them, where
            the model's format shows none there.
        takes_images: Whether pictures may be in it.
        cache_salt: The request's: what is remembered of pictures is not shared beyond it.
    """

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = NO_TOOLS
    parallel_tool_calls: bool = True
    breakpoints: Sequence[Breakpoint] = ()
    has_form: bool = False
    call_id_form: str = ""
    origins: Sequence[int] = ()
    num_entries: int | None = None
    image_settings: Mapping[str, Any] | None = None
    moves_images: bool = False
    takes_images: bool = True
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that was rendered.

    Attributes:
        prompt: For the engine.
        in_reasoning: Whether the answer begins inside the reasoning.
        make_parser: Makes the reader of one answer; every answer (``n``) needs its own.
        adapt_params: Completes sampling parameters in place: where the reasoning ends, the grammar
            of calls that must be made, which special tokens the reader must see.
        task: The chat as it was rendered.
        num_said: Tokens before those that open the answer; all, where the format does not tell.
    """

    prompt: TokenizedPrompt
    in_reasoning: bool
    make_parser: Callable[[], ResponseParser]
    adapt_params: Callable[[SamplingParams], SamplingParams]
    task: ChatTask
    num_said: int


def structure_names(
    task: ChatTask, request: SamplingRequest, field_names: Mapping[str, str]
) -> dict[str, str]:
    """Return the request's own names for what errors say of a chat's grammar.

    Args:
        task: The chat.
        request: Its sampling fields.
        field_names: Other fields of chats in the names of the API that was called; returned too.
    """
    field = find_structured_field(request)
    own = None if field is None else field_names.get(field, field)
    tools = "tools" if task.tools and task.tool_choice.mode != "none" else None
    whole = [tools, None if task.tool_choice.is_forced else own]
    if own is not None and not task.tool_choice.is_forced and asks_for_tag(request):
        whole = [own]  # it says itself where calls stand
    named = {
        "structured_outputs": " and ".join(name for name in whole if name is not None),
        TOOLS_PART: tools,
        ANSWER_PART: own,
    }
    return {**field_names, **{below: name for below, name in named.items() if name}}


async def prepare_chat(
    task: ChatTask, context: ServingContext, max_tokens: int | None = None
) -> PreparedChat:
    """Render and tokenise a chat, in a thread: templates are programs and texts are long.

    Args:
        task: The chat.
        context: The server's.
        max_tokens: What cannot have as few is refused unread; None: everything is read.

    Raises:
        UserInputError: A message, tool or option is wrong.
        ContextLengthError: The chat is longer than ``max_tokens``.
    """
    parsers = context.parsers
    may_call = bool(task.tools) and task.tool_choice.mode != "none"
    if may_call and parsers.tools == NONE:
        raise UserInputError(
            "tools cannot be served: how this model writes calls is not known. Start the server "
            f"with --tool-call-parser (one of {', '.join(TOOL_PARSERS)}), or leave tools out.",
            "tools",
        )
    # With "none" the model is not even told: prompts that say "do not" still tempt.
    tools = task.tools if may_call else ()
    options = replace(task.options, tools=tools, max_prompt_tokens=max_tokens)
    check_unread(context.tokenizer, task.messages, max_tokens)
    shown = await read_pictures(
        task.messages,
        context,
        task.image_settings,
        task.cache_salt,
        moves_results=task.moves_images,
        are_taken=task.takes_images,
    )
    options = replace(options, images=shown.images)
    task = replace(task, options=options, messages=with_own_ids(parsers.tools, shown.messages))
    num_chars = count_chars([task.messages, [tool.function for tool in options.tools]])
    prompt, marked = await context.workers.run(
        num_chars * (1 + len(task.breakpoints)), partial(_encode, task, context.chat_encoder)
    )
    context.client_metrics.note_prompt(prompt)
    parse_options = ParseOptions(
        in_reasoning=prompt.in_reasoning,
        tools=task.tools,
        tool_use=_tool_use(task),
        one_call=not task.parallel_tool_calls,
        accepts_id=partial(_accepts_id, task.call_id_form),
        on_malformed=partial(context.client_metrics.note_malformed_call, parsers.tools),
        may_call_in_thought=not (task.has_form or task.tool_choice.is_forced),
    )
    return PreparedChat(
        prompt=_with_pictures(prompt, shown.read).with_breakpoints(marked),
        in_reasoning=prompt.in_reasoning,
        make_parser=partial(parsers.make_parser, parse_options),
        adapt_params=partial(_adapt_params, context, task, prompt),
        task=task,
        num_said=_num_said(task.options, prompt),
    )


def _with_pictures(prompt: ChatPrompt, images: Sequence[ReadImage]) -> TokenizedPrompt:
    """The prompt for the engine: where pictures begin and end, others go on otherwise, too."""
    features = tuple(images[index].at(offset) for index, offset in prompt.image_offsets)
    places = [place for image in reversed(features) for place in (image.end, image.offset)]
    ends = prompt.part_ends
    places = [place for place in places if 0 < place < len(prompt.token_ids) and place not in ends]
    shared, later = ends[:NUM_SHARED_ENDS], ends[NUM_SHARED_ENDS:]
    boundaries = (*shared, *places[:_MAX_IMAGE_ENDS], *later)[:MAX_CACHE_BOUNDARIES]
    return TokenizedPrompt(prompt.token_ids, prompt.text, boundaries, images=features)


def _num_said(options: ChatOptions, prompt: ChatPrompt) -> int:
    """Tokens of a prompt before those that open an answer."""
    opens = options.add_generation_prompt and not options.continue_final_message
    return max(prompt.part_ends if opens else (), default=len(prompt.token_ids))


def _encode(
    task: ChatTask, encoder: ChatEncoder, is_wanted: Callable[[], bool]
) -> tuple[ChatPrompt, Mapping[int, float | None]]:
    """The prompt, and its marked places in tokens, as far as somebody waits for them."""
    prompt = encoder.encode_chat(task.messages, task.options)
    # Each costs an encoding.
    places = itertools.takewhile(lambda _: is_wanted(), task.breakpoints)
    return prompt, find_breakpoints(encoder, task.messages, task.options, prompt, places)


def _accepts_id(form: str, call_id: str) -> bool:
    return accepts_any_id(call_id) and (not form or re.fullmatch(form, call_id) is not None)


def _tool_use(task: ChatTask) -> ToolUse:
    if not task.tools:
        return ToolUse.OFF
    return ToolUse.DROP if task.tool_choice.mode == "none" else ToolUse.PARSE


def _adapt_params(
    context: ServingContext, task: ChatTask, prompt: ChatPrompt, params: SamplingParams
) -> SamplingParams:
    """Mutates: params."""
    if context.parsers.reads_special_tokens:
        params.skip_special_tokens = False
    tags = context.parsers.reasoning_tags
    if prompt.in_reasoning and tags is not None:
        token_id = context.tokenizer.token_to_id(tags.end)
        ids = [token_id] if token_id is not None else context.tokenizer.encode(tags.end, False)
        params.reasoning = ReasoningSpan(end_token_ids=ids)
        is_followed = params.thinking_token_budget is not None or params.structured_outputs
        if is_followed or task.tool_choice.is_forced:
            names = [tool.name for tool in task.options.tools]
            marks = call_marks(context.parsers.tools, names) if names else []
            params.reasoning.call_token_ids = spell_marks(context.tokenizer, marks)
    params.structured_outputs = _answer_grammar(context, task, prompt, params.structured_outputs)
    return params


def _answer_grammar(
    context: ServingContext,
    task: ChatTask,
    prompt: ChatPrompt,
    asked: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """What an answer must follow: calls, a form, or either of the two; None: nothing."""
    choice = task.tool_choice
    may_call = bool(task.options.tools)
    if not choice.is_forced and (asked is None or not (may_call or context.parsers.is_harmony)):
        return asked
    form: Format | None = None
    if asked is not None and not choice.is_forced:
        with fields_named({"structured_outputs": ANSWER_PART}):
            form = _form_of(asked)
    if not choice.is_forced and form is None:
        return asked  # a structural tag says itself where calls stand
    tools = task.tools if may_call else ()
    # One that is open ends before the grammar begins.
    has_thought = prompt.in_reasoning or prompt.has_reasoned
    grammar = AnswerGrammar(
        tools=[tool for tool in tools if choice.name is None or tool.name == choice.name],
        form=None if form is None else {**form, "of": ANSWER_PART},
        one_call=choice.name is not None or not task.parallel_tool_calls,
        thought=None if has_thought else context.parsers.reasoning_tags,
        is_behind_thought=has_thought,
    )
    tag = answer_tag(context.parsers.tools, grammar)
    if asked is None or form is None:
        return StructuredOutputsParams(structural_tag=tag)
    return StructuredOutputsParams(
        structural_tag=tag,
        disable_any_whitespace=asked.disable_any_whitespace,
        disable_additional_properties=asked.disable_additional_properties,
        whitespace_pattern=asked.whitespace_pattern,
    )


def _form_of(asked: StructuredOutputsParams) -> Format | None:
    """What a request asks of its answer, as a part of a structural tag; None: it is one.

    Raises:
        UserInputError: It is no JSON schema.
    """
    if asked.json is not None:
        return json_of(read_schema(asked.json))
    if asked.json_object:
        return json_of({"type": "object"})
    if asked.regex is not None:
        return {"type": "regex", "pattern": asked.regex}
    if asked.choice is not None:
        return any_of(*map(text, asked.choice))
    if asked.grammar is not None:
        return {"type": "grammar", "grammar": asked.grammar}
    return None
