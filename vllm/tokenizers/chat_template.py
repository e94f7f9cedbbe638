"""Chats by Jinja template, for checkpoints that carry one (or a user who gives one)."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vllm.exceptions import ConfigError, UserInputError
from vllm.tokenizers.billing_line import leave_out_billing_line
from vllm.tokenizers.chat_messages import (
    ChatMessage,
    ChatOptions,
    ChatPrompt,
    check_options,
    find_part_ends,
    parse_messages,
)
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.content_parts import find_image_roles, find_part_roles
from vllm.tokenizers.described_tools import WriteCalls, describe_tools
from vllm.tokenizers.end_marker import EndMarker
from vllm.tokenizers.fitted_messages import fit_messages
from vllm.tokenizers.guarded_messages import guard_messages
from vllm.tokenizers.literal_text import LiteralText
from vllm.tokenizers.part_openers import find_openers
from vllm.tokenizers.template_traits import (
    PROBE_TOOL,
    PROBE_USER,
    Chat,
    TemplateTraits,
    find_tool_form,
    find_traits,
    needs_text_arguments,
    shows_tools,
)
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tokenizers.tool_calls import RAW_ARGUMENTS, split_object
from vllm.tokenizers.tool_forms import TOOL_FORMS

# What an answer that begins inside its reasoning follows: Gemma 4's does behind results of calls.
_THOUGHT_OPENINGS = ("<think>", "<|channel>thought")
_OWN_ARGUMENTS = ("messages", "add_generation_prompt", "bos_token", "eos_token", "tools")


class _GenerationTag(Extension):
    """Accepts ``{% generation %}...{% endgeneration %}``, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012 (the base class says set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the tag's body as if the tag were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaChatEncoder:
    """Encodes chats with a template in the dialect that checkpoints use.

    Args:
        tokenizer: The checkpoint's.
        template: The template's text.
        literal_text: Keeps special tokens in messages text; None: they become special.
        tool_template: The text of that for chats with tools; None: the same.
        keeps_billing_line: Whether prompts keep the line of ``billing_line``.
        write_calls: Writes calls where the template ignores tools, which then are told in the
            system text; None: they are not told.

    Raises:
        ConfigError: The template does not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        literal_text: LiteralText | None = None,
        tool_template: str | None = None,
        *,
        keeps_billing_line: bool = False,
        write_calls: WriteCalls | None = None,
    ) -> None:
        tokens = tokenizer.template_tokens
        self._template = CompiledTemplate(template, tokens)
        self._tool_template = self._template
        if tool_template is not None:
            self._tool_template = CompiledTemplate(tool_template, tokens)
        self._tokenizer = tokenizer
        self._literal_text = literal_text
        self._keeps_billing_line = keeps_billing_line
        self._write_calls = write_calls if self.ignores_tools else None
        # Tokens that begin a message; None: not known yet.
        self._openers: frozenset[int] | None = None

    @property
    def ignores_tools(self) -> bool:
        """Whether the template never tells the model of a tool."""
        return not self._tool_template.traits(with_tools=True).shows_tools

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> ChatPrompt:
        """Return the prompt of ``messages``; see ChatEncoder."""
        parsed = parse_messages(messages)
        check_options(options, parsed)
        placed, has_line = leave_out_billing_line(enumerate(parsed), self._keeps_billing_line)
        tools = options.tools
        if self._write_calls is not None:
            placed, tools = describe_tools(placed, tools, self._write_calls), ()
        template = self._tool_template if tools else self._template
        traits = template.traits(with_tools=bool(tools))
        fitted = fit_messages(placed, traits)
        guarded = guard_messages(self._literal_text, [p.message for p in fitted], tools)
        text = self._render(template, guarded.messages, guarded.tools, options)
        encoded = guarded.encode(self._tokenizer, text, options)
        text, token_ids = encoded.text, encoded.token_ids
        return ChatPrompt(
            text,
            token_ids,
            image_offsets=encoded.image_offsets,
            in_reasoning=text.rstrip().endswith(_THOUGHT_OPENINGS),
            has_reasoned=text.rstrip().endswith("</think>"),
            part_ends=self._find_part_ends(token_ids),
            joined=tuple(p.places for p in fitted if len(set(p.places)) > 1),
            left_out_billing_line=has_line,
        )

    def image_roles(self, marker: str) -> frozenset[str]:
        """See ChatEncoder."""
        return self._template.image_roles(marker)

    def _find_part_ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return where messages end, as far as the template marks their beginnings."""
        if self._openers is None:
            # Encoding the probe leads here again.
            self._openers = frozenset()
            options = ChatOptions(add_generation_prompt=False)
            self._openers = find_openers(
                lambda messages: self.encode_chat(messages, options).token_ids,
                self._tokenizer.all_special_ids,
            )
        return find_part_ends(token_ids, self._openers)

    def _render(
        self,
        template: "CompiledTemplate",
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        options: ChatOptions,
    ) -> str:
        clash = sorted(set(options.template_kwargs) & set(_OWN_ARGUMENTS))
        if clash:
            raise UserInputError(
                f"chat_template_kwargs may not set {', '.join(clash)}.", "chat_template_kwargs"
            )
        arguments: dict[str, Any] = dict(options.template_kwargs)
        if options.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", options.reasoning_effort)
        if options.reasoning_effort == "none":
            arguments.setdefault("enable_thinking", False)
        if options.continue_final_message:
            return self._render_open(template, messages, tools, arguments)
        return template.render(
            messages, tools, {**arguments, "add_generation_prompt": options.add_generation_prompt}
        )

    def _render_open(
        self,
        template: "CompiledTemplate",
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        arguments: Mapping[str, Any],
    ) -> str:
        """Return the text up to the end of the last message's content."""
        end = EndMarker()
        marked = [*messages[:-1], end.put_behind(messages[-1])]
        return end.cut(
            template.render(marked, tools, {**arguments, "add_generation_prompt": False}),
            messages[-1],
        )


class CompiledTemplate:
    """A template, and what it takes.

    Owns: what it knows of roles with pictures.

    Args:
        text: The template's.
        tokens: Special tokens that it knows by name, with their spellings.

    Raises:
        ConfigError: It is not valid Jinja.
    """

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        self._template = compile_template(text)
        self._tokens = tokens
        self._traits = self._find_traits()
        # Tried where a picture comes: by marker.
        self._image_roles: dict[str, frozenset[str]] = {}

    def traits(self, *, with_tools: bool) -> TemplateTraits:
        """Return what it takes, in chats with tools or without."""
        return self._traits[with_tools]

    def image_roles(self, marker: str) -> frozenset[str]:
        """Return the roles in whose messages it shows pictures, found out by trying."""
        if marker not in self._image_roles:
            plain = {"add_generation_prompt": False}
            found = find_image_roles(lambda messages: self._run(messages, (), plain), marker)
            self._image_roles[marker] = found
        return self._image_roles[marker]

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
        arguments: Mapping[str, Any],
    ) -> str:
        """Return the text of checked messages.

        Tools go in as they were sent. If the template refuses them so, what the API calls optional
        is spelled out, step by step.

        Raises:
            UserInputError: The template refuses them.
        """
        traits = self._traits[bool(tools)]
        first = TOOL_FORMS.index(traits.tool_form)
        rendered = [_as_template_message(message, traits) for message in messages]
        refusal: UserInputError | None = None
        for form in TOOL_FORMS[first:] if tools else TOOL_FORMS[:1]:
            functions = [form(tool.function) for tool in tools]
            try:
                return self._run(rendered, functions, arguments)
            except UserInputError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        try:
            return self._template.render(
                **{
                    **self._tokens,
                    "documents": None,
                    **arguments,
                    "messages": messages,
                    "tools": [{"type": "function", "function": f} for f in functions] or None,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # A template is a program fed with the request: what it trips over is the request's.
            raise UserInputError(
                f"The chat template refuses these messages: {error}.", "messages"
            ) from error

    def _find_traits(self) -> Mapping[bool, TemplateTraits]:
        """Try the template, without the arguments of requests, which may change with the next."""
        plain = {"add_generation_prompt": False}
        parts = find_part_roles(lambda messages: self._run(messages, (), plain))

        def run(traits: TemplateTraits, tools: Sequence[Mapping[str, Any]], chat: Chat) -> str:
            return self._run([_as_template_message(m, traits) for m in chat], tools, plain)

        def with_arguments(as_text: bool, chat: Chat) -> str:
            return run(TemplateTraits(parts=parts, text_arguments=as_text), (), chat)

        known = TemplateTraits(parts=parts, text_arguments=needs_text_arguments(with_arguments))
        form = find_tool_form(lambda function: run(known, [function], [PROBE_USER]))
        known = replace(known, tool_form=form)
        tool = form(PROBE_TOOL)
        without = find_traits(partial(run, known, ()), known)
        known = replace(known, shows_tools=shows_tools(partial(run, known, [tool])))
        try:
            run(known, [tool], [PROBE_USER])
        except UserInputError:
            return {False: without, True: replace(without, shows_tools=known.shows_tools)}
        return {False: without, True: find_traits(partial(run, known, [tool]), known)}


def compile_template(template: str) -> jinja2.Template:
    """Compile a chat template in the sandbox.

    Raises:
        ConfigError: It is not valid Jinja.
    """
    # Templates come with downloaded checkpoints: code in them must not reach Python.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["as_json"] = _as_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"The chat template is not valid Jinja: {error}.") from error


class _Arguments(dict[str, Any]):
    """A call's arguments, which ``tojson`` writes as the model did: its tokens must come back.

    What a limit cut off is no object: one field of raw text, where a template asks for fields.
    """

    def __init__(self, raw: str) -> None:
        is_object = split_object(raw) is not None
        super().__init__(json.loads(raw) if is_object else {RAW_ARGUMENTS: raw})
        self.raw = raw


def _as_template_message(message: ChatMessage, traits: TemplateTraits) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    in_parts = traits.parts.takes if message.parts is not None else traits.parts.needs
    if message.role in in_parts or message.images:
        parts = (message.content,) if message.parts is None else message.parts
        rendered["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
    if message.name is not None:
        rendered["name"] = message.name
    if message.reasoning:
        # Templates disagree on the name.
        for name in ("reasoning", "reasoning_content", "thinking"):
            rendered[name] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments
                    if traits.text_arguments
                    else _Arguments(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes HTML, which prompts must not have."""
    if isinstance(value, _Arguments) and indent is None and separators is None and not sort_keys:
        return value.raw
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _as_json(text: str) -> str:
    """Return the JSON that a text is, or the text as JSON: for templates of our own."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)
