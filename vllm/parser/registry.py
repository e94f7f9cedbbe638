"""Parsers by name, and which ones a served model gets."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.exceptions import ConfigError
from vllm.parser.dialect import ToolDialect
from vllm.parser.dsml import DsmlDialect
from vllm.parser.harmony import HarmonyParser
from vllm.parser.interface import ParseOptions, ResponseParser
from vllm.parser.json_calls import HermesDialect, LlamaDialect
from vllm.parser.plain import PlainParser
from vllm.parser.tagged import ReasoningTags, TaggedParser

NONE = "none"
_HARMONY_TOOLS, _HARMONY_REASONING = "openai", "openai_gptoss"

# None: gpt-oss, whose reasoning and calls one machine reads.
TOOL_PARSERS: Mapping[str, ToolDialect | None] = {
    "deepseek_v4": DsmlDialect(),
    "hermes": HermesDialect(),
    "qwen3": HermesDialect(),
    "llama3_json": LlamaDialect(),
    _HARMONY_TOOLS: None,
}
REASONING_PARSERS: Mapping[str, ReasoningTags | None] = {
    "deepseek_v4": ReasoningTags(),
    "qwen3": ReasoningTags(trims=True),
    _HARMONY_REASONING: None,
}


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
        """Whether answers are gpt-oss's; their marks are special tokens, which texts leave out."""
        return self.tools == _HARMONY_TOOLS or self.reasoning == _HARMONY_REASONING

    @property
    def reasoning_end(self) -> str | None:
        """What ends the reasoning of an answer that begins inside it; None: nothing is known to."""
        tags = REASONING_PARSERS.get(self.reasoning)
        return None if tags is None else tags.end

    def make_parser(self, options: ParseOptions) -> ResponseParser:
        """Return a machine for one answer."""
        if self.is_harmony:
            return HarmonyParser(self.reasoning != NONE, options)
        tags = REASONING_PARSERS.get(self.reasoning)
        dialect = TOOL_PARSERS.get(self.tools)
        if tags is None and dialect is None:
            return PlainParser()
        return TaggedParser(tags, dialect, options)


def choose_parsers(
    model_type: str,
    chat_template: str | None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ParserChoice:
    """Return what the served model's answers are read with.

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
    return choice


def _of_model(model_type: str, template: str) -> ParserChoice:
    """The formats of a model, by its type or else by what its template writes."""
    if model_type == "deepseek_v4" and not template:
        return ParserChoice("deepseek_v4", "deepseek_v4")
    if "<|channel|>" in template:
        return ParserChoice(_HARMONY_REASONING, _HARMONY_TOOLS)
    reasoning = "qwen3" if "</think>" in template else NONE
    if "<tool_call>" in template:
        return ParserChoice(reasoning, "qwen3" if model_type.startswith("qwen") else "hermes")
    if "tools" in template and '"parameters": ' in template:
        return ParserChoice(reasoning, "llama3_json")
    return ParserChoice(reasoning, NONE)


def check_parser_names(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Check two flags; None or "" leaves the choice to the model.

    Raises:
        ConfigError: A name is unknown.
    """
    for flag, name, known in (
        ("--tool-call-parser", tool_call_parser, list(TOOL_PARSERS)),
        ("--reasoning-parser", reasoning_parser, list(REASONING_PARSERS)),
    ):
        if name and name != NONE and name not in known:
            raise ConfigError(f"{flag} {name!r} is unknown: use one of {', '.join(known)}, {NONE}.")
