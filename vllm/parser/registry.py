"""Parsers by name, and which ones a served model gets."""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, cast

from vllm.exceptions import ConfigError
from vllm.parser.call_ids import spell_kimi_id
from vllm.parser.dialect import ToolDialect
from vllm.parser.interface import ParseOptions, ResponseParser, new_call_id
from vllm.parser.plain import PlainParser
from vllm.parser.tagged import ReasoningTags, TaggedParser

NONE = "none"
_HARMONY_TOOLS, _HARMONY_REASONING = "openai", "openai_gptoss"
_MISTRAL = ("mistral", "mistral_v11")

_HARMONY_PARSER = "harmony:HarmonyParser"

# Where a format's ``ToolDialect`` is, as "module:name" of this folder: a server loads its own
# format's alone. None: gpt-oss, whose reasoning and calls one machine reads.
TOOL_PARSERS: Mapping[str, str | None] = {
    "deepseek_v3": "marked_sections:DEEPSEEK",
    "deepseek_v31": "marked_sections:DEEPSEEK",
    "deepseek_v32": "tag_dialects:DSML_V4",
    "deepseek_v4": "tag_dialects:DSML_V4",
    "deepseek_v41": "tag_dialects:DSML_V41",
    "functiongemma": "gemma:FUNCTION_GEMMA",
    "gemma4": "gemma:GEMMA4",
    "glm": "tag_dialects:GLM",
    "hermes": "tag_dialects:HERMES",
    "kimi_k2": "marked_sections:KIMI",
    "llama3_json": "llama:LLAMA",
    "mistral": "mistral:MISTRAL",
    "mistral_v11": "mistral:MISTRAL",
    _HARMONY_TOOLS: None,
    "pythonic": "pythonic:PYTHONIC",
    "qwen3": "tag_dialects:HERMES",
    "qwen3_coder": "tag_dialects:QWEN3_CODER",
}
REASONING_PARSERS: Mapping[str, ReasoningTags | None] = {
    "deepseek_v32": ReasoningTags(),
    "deepseek_v4": ReasoningTags(),
    "deepseek_v41": ReasoningTags(),
    "gemma4": ReasoningTags("<|channel>thought", "<channel|>", trims=True),
    "glm": ReasoningTags(trims=True),
    "kimi_k2": ReasoningTags(),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", trims=True),
    "qwen3": ReasoningTags(trims=True),
    _HARMONY_REASONING: None,
}
# Other names that people know the same formats by.
_TOOL_ALIASES = {
    "deepseek_v4_1": "deepseek_v41",
    "glm45": "glm",
    "glm47": "glm",
    "kimi": "kimi_k2",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
_REASONING_ALIASES = {
    "deepseek_r1": "deepseek_v4",
    "deepseek_v3": "deepseek_v4",
    "deepseek_v31": "deepseek_v4",
    "deepseek_v4_1": "deepseek_v41",
    "glm45": "glm",
    "kimi": "kimi_k2",
}
# Whose marks are special tokens, which texts leave out.
_MARKS_ARE_SPECIAL = frozenset(
    {
        *(_HARMONY_TOOLS, _HARMONY_REASONING, "gemma4", "functiongemma", "kimi_k2", *_MISTRAL),
        *("deepseek_v3", "deepseek_v31"),
    }
)
# What a template writes tells the format; the first that fits.
_TOOLS_OF_TEMPLATE = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<arg_key>", "glm"),
    ("<parameter=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v31"),
    ("\uff5cDSML\uff5c", "deepseek_v4"),
)
_REASONING_OF_TEMPLATE = (
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)
# Llama 3's call, as its template asks for it, or writes one that was made. A template that lists
# tools with their "parameters" alone may have any format of calls.
_LLAMA_CALL = re.compile(
    r'\{"name": [^"{}]*, "parameters": [^"{}]*\}|"name": .{0,80}?"parameters": .{0,60}?arguments',
    re.DOTALL,
)
_ID_CHARS = string.ascii_letters + string.digits
_MISTRAL_ID_CHARS = 9


def find_dialect(tools: str) -> ToolDialect | None:
    """Return how calls of a format are read; None: it has none, or gpt-oss's."""
    path = TOOL_PARSERS.get(tools)
    return None if path is None else cast(ToolDialect, _load(path))


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name)


def _new_mistral_id() -> str:
    """Return an id of a call as Mistral's templates insist on."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_MISTRAL_ID_CHARS))


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The formats an answer is read in.

    Attributes:
        reasoning: Name of the reasoning's format; "none": reasoning is content.
        tools: Name of the format of tool calls; "none": tools are refused.
    """

    reasoning: str = NONE
    tools: str = NONE

    @property
    def is_harmony(self) -> bool:
        """Whether answers are gpt-oss's."""
        return self.tools == _HARMONY_TOOLS or self.reasoning == _HARMONY_REASONING

    @property
    def reads_special_tokens(self) -> bool:
        """Whether a format's marks are special tokens, which texts otherwise leave out."""
        return bool({self.tools, self.reasoning} & _MARKS_ARE_SPECIAL)

    @property
    def reasoning_tags(self) -> ReasoningTags | None:
        """How the model tags its thoughts; None: it has none, or no tags."""
        return REASONING_PARSERS.get(self.reasoning)

    def make_parser(self, options: ParseOptions) -> ResponseParser:
        """Return a machine for one answer."""
        if self.is_harmony:
            reads_reasoning = self.reasoning != NONE
            return cast(ResponseParser, _load(_HARMONY_PARSER)(reads_reasoning, options))
        tags = self.reasoning_tags
        dialect = find_dialect(self.tools)
        if self.tools in _MISTRAL and options.new_call_id is new_call_id:
            options = replace(options, new_call_id=_new_mistral_id)
        if self.tools == "kimi_k2" and options.new_call_id is new_call_id:
            options = replace(options, spell_id=spell_kimi_id)
        if tags is None and dialect is None:
            return PlainParser()
        return TaggedParser(tags, dialect, options)


def choose_parsers(
    model_type: str,
    chat_template: str | None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ParserChoice:
    """Return what the served model's answers are read with, loaded.

    Args:
        model_type: Of the checkpoint.
        chat_template: Its Jinja template, which shows the format; None: there is none.
        tool_call_parser: ``--tool-call-parser``; None or "": by the model; "none": none.
        reasoning_parser: ``--reasoning-parser``; likewise.

    Raises:
        ConfigError: A name is unknown, or the two belong to formats that exclude each other.
    """
    check_parser_names(tool_call_parser, reasoning_parser)
    own = _of_model(model_type, chat_template or "")
    tool_call_parser = _TOOL_ALIASES.get(tool_call_parser or "", tool_call_parser)
    reasoning_parser = _REASONING_ALIASES.get(reasoning_parser or "", reasoning_parser)
    tools, reasoning = tool_call_parser or own.tools, reasoning_parser or own.reasoning
    if tools == _HARMONY_TOOLS and reasoning not in (_HARMONY_REASONING, NONE):
        reasoning = _HARMONY_REASONING if not reasoning_parser else reasoning
    if reasoning == _HARMONY_REASONING and not tool_call_parser:
        tools = _HARMONY_TOOLS
    choice = ParserChoice(reasoning, tools)
    mixes = tools not in (_HARMONY_TOOLS, NONE) or reasoning not in (_HARMONY_REASONING, NONE)
    if choice.is_harmony and mixes:
        raise ConfigError(
            f"--tool-call-parser {tools!r} and --reasoning-parser {reasoning!r} cannot be mixed: "
            f"{_HARMONY_TOOLS} goes with {_HARMONY_REASONING}."
        )
    # Its modules are imported now, and not while the first answer waits.
    choice.make_parser(ParseOptions())
    return choice


def _of_model(model_type: str, template: str) -> ParserChoice:
    """The formats of a model, by what its template writes or else by its type."""
    if "<|channel|>" in template:
        return ParserChoice(_HARMONY_REASONING, _HARMONY_TOOLS)
    tools = _first_in(template, _TOOLS_OF_TEMPLATE)
    reasoning = _first_in(template, _REASONING_OF_TEMPLATE)
    if not template and model_type.startswith("gemma4"):
        return ParserChoice("gemma4", "gemma4")
    if tools == "hermes" and model_type.startswith("qwen"):
        tools = "qwen3"
    if tools == "glm" and reasoning != NONE:
        reasoning = "glm"
    if tools == NONE and "[TOOL_CALLS]" in template:
        tools = "mistral_v11" if "[ARGS]" in template else "mistral"
    if tools == NONE and "func_name1(params_name1" in template:
        tools = "pythonic"
    if tools == NONE and "tools" in template and _LLAMA_CALL.search(template):
        tools = "llama3_json"
    if model_type.startswith("deepseek_v4") and tools in (NONE, "deepseek_v4"):
        own = "deepseek_v41" if model_type.startswith("deepseek_v41") else "deepseek_v4"
        return ParserChoice(own, own)
    # Templates may make the tag of two parts.
    if tools == "deepseek_v4" and "function_calls>" in template:
        tools = "deepseek_v32"
    if tools == "deepseek_v31":
        if "```json" in template:
            # V3's and R1's; of its distills none was trained to call.
            tools = "deepseek_v3" if model_type.startswith("deepseek") else NONE
        reasoning = "deepseek_v4" if tools != NONE and reasoning != NONE else reasoning
    if tools == "deepseek_v32" or (model_type == "deepseek_v32" and not template):
        return ParserChoice("deepseek_v32", "deepseek_v32")
    return ParserChoice(reasoning, tools)


def _first_in(template: str, marks: Sequence[tuple[str, str]]) -> str:
    return next((name for mark, name in marks if mark in template), NONE)


def check_parser_names(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Check two flags; None or "" leaves the choice to the model.

    Raises:
        ConfigError: A name is unknown.
    """
    for flag, name, known in (
        ("--tool-call-parser", tool_call_parser, [*TOOL_PARSERS, *_TOOL_ALIASES]),
        ("--reasoning-parser", reasoning_parser, [*REASONING_PARSERS, *_REASONING_ALIASES]),
    ):
        if name and name != NONE and name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown: use one of {', '.join(known)}, {NONE}.")
