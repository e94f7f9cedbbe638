"""A checked request: what the engine is asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.anthropic.conversion import convert_messages
from vllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from vllm.entrypoints.anthropic.tools import convert_tool_choice, convert_tools
from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask
from vllm.entrypoints.openai.pipeline.single_answer import (
    AnswerRequest,
    check_encodable,
    check_single,
    sampling_of,
)
from vllm.exceptions import ThreadsUnsupportedError, UnsupportedFeatureError, UserInputError
from vllm.tokenizers import ChatOptions
from vllm.tokenizers.chat_tools import parse_tool_choice, parse_tools

# Names of the code below for fields of this API.
FIELD_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
_MIN_BUDGET = 1024
# What Anthropic's API takes for the id of a call.
_CALL_ID_FORM = "[a-zA-Z0-9_-]+"
_DISPLAYS = (None, "summarized", "omitted")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a request says about thinking.

    Attributes:
        is_on: Whether the model thinks before it answers.
        budget: Tokens after which it is stopped; None: no limit but the answer's.
        is_hidden: Whether only the signature is told.
    """

    is_on: bool = False
    budget: int | None = None
    is_hidden: bool = False


def read_thinking(thinking: Mapping[str, Any] | None, max_tokens: int | None) -> Thinking:
    """Check ``thinking``; absent it is off, as in Anthropic's API.

    Args:
        thinking: The field.
        max_tokens: Of the answer, thinking included; None: no answer is made.

    Raises:
        UserInputError: It is malformed, or its budget out of range.
        UnsupportedFeatureError: A way of thinking is not served.
    """
    if thinking is None:
        return Thinking()
    kind = thinking.get("type")
    if kind == "disabled":
        return Thinking()
    if kind == "between_tools":
        raise UnsupportedFeatureError(
            "thinking.type='between_tools' is not supported: use enabled, adaptive or disabled.",
            "thinking",
        )
    if kind not in ("enabled", "adaptive"):
        raise UserInputError(
            f"thinking.type={str(kind)[:60]!r} is unknown: use enabled, adaptive or disabled.",
            "thinking",
        )
    display = thinking.get("display")
    if display not in _DISPLAYS:
        raise UserInputError(
            f"thinking.display={str(display)[:60]!r} must be summarized or omitted.", "thinking"
        )
    budget = _read_budget(thinking, max_tokens) if kind == "enabled" else None
    return Thinking(True, budget, display == "omitted")


def _read_budget(thinking: Mapping[str, Any], max_tokens: int | None) -> int:
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or budget < _MIN_BUDGET:
        raise UserInputError(
            f"thinking.budget_tokens={str(budget)[:40]} must be a whole number of at least "
            f"{_MIN_BUDGET}.",
            "thinking",
        )
    if max_tokens is not None and budget >= max_tokens:
        raise UserInputError(
            f"thinking.budget_tokens={budget} must be below max_tokens={max_tokens}.", "thinking"
        )
    return budget


def make_answer_request(
    body: CountTokensRequest, thinking: Thinking, context: ServingContext
) -> AnswerRequest:
    """Return what to ask of the engine.

    Raises:
        UserInputError: A field is wrong.
        UnsupportedFeatureError: One asks for what is not served.
    """
    if body.thread is not None:
        raise ThreadsUnsupportedError(
            "thread is not supported: send the full conversation without it.", "thread"
        )
    check_single(body)
    chat = convert_messages(
        body.system, body.messages, tools=body.tools or (), cache_control=body.cache_control
    )
    check_encodable([chat.messages, body.tools], "messages")
    specs = parse_tools(convert_tools(body.tools))
    choice, is_parallel = convert_tool_choice(body.tool_choice)
    if chat.continues and thinking.is_on:
        raise UserInputError(
            "The last message is the assistant's: with thinking it cannot be continued, end with "
            "a user message.",
            "messages",
        )
    effort, response_format = read_output_config(body.output_config, body.output_format)
    names = {**FIELD_NAMES, "response_format": _name_format(body.output_config, body.output_format)}
    switches = {"thinking": thinking.is_on, "enable_thinking": thinking.is_on}
    options = ChatOptions(
        add_generation_prompt=not chat.continues,
        continue_final_message=chat.continues,
        reasoning_effort=effort,
        template_kwargs={
            **context.args.default_chat_template_kwargs,
            **switches,
            **(body.chat_template_kwargs or {}),
        },
    )
    task = ChatTask(
        messages=chat.messages,
        options=options,
        tools=specs,
        tool_choice=parse_tool_choice(choice, specs),
        parallel_tool_calls=is_parallel is not False,
        breakpoints=chat.breakpoints,
        has_form=response_format is not None,
        call_id_form=_CALL_ID_FORM,
        origins=chat.origins,
        num_entries=len(body.messages),
        image_settings=body.mm_processor_kwargs,
        moves_images=True,
        cache_salt=body.cache_salt,
    )
    stop = body.stop_sequences if isinstance(body, MessagesRequest) else None
    sampling = sampling_of(
        body,
        stop=stop or body.stop,
        response_format=response_format,
        thinking_token_budget=thinking.budget,
    )
    return AnswerRequest(task, sampling, names, body.max_tokens)


def _name_format(config: Mapping[str, Any] | None, output_format: Any) -> str:
    """Return the field that asks for a format."""
    is_older = output_format is not None and "format" not in (config or {})
    return "output_format" if is_older else FIELD_NAMES["response_format"]


def read_output_config(
    config: Mapping[str, Any] | None, output_format: Mapping[str, Any] | None = None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the effort, and the response format as chats spell it.

    Args:
        config: ``output_config``.
        output_format: An older name of its format.

    Raises:
        UserInputError: It is malformed.
    """
    effort = (config or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise UserInputError("output_config.effort must be a string.", "output_config")
    wanted = (config or {}).get("format", output_format)
    if wanted is None:
        return effort, None
    schema = wanted.get("schema") if isinstance(wanted, Mapping) else None
    if not isinstance(schema, Mapping) or wanted.get("type") != "json_schema":
        field = _name_format(config, output_format)
        raise UserInputError(
            f'{field} must be {{"type": "json_schema", "schema": {{...}}}}.', field.split(".")[0]
        )
    return effort, {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
