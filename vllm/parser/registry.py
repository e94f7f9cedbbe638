"""Parsers by name, and which ones a served model gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm.exceptions import ConfigError
from vllm.parser.interface import ParseOptions, ResponseParser
from vllm.parser.plain import PlainParser

NONE = "none"


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
    def needs_special_tokens(self) -> bool:
        """Whether the format's marks are special tokens, which texts otherwise leave out."""
        return False

    def make_parser(self, options: ParseOptions) -> ResponseParser:
        """Return a machine for one answer."""
        return PlainParser()


REASONING_PARSERS: Mapping[str, Callable[..., ResponseParser]] = {}
TOOL_PARSERS: Mapping[str, Callable[..., ResponseParser]] = {}


def choose_parsers(
    model_type: str,
    chat_template: str | None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ParserChoice:
    """Return what the served model's answers are read with.

    Args:
        model_type: Of the checkpoint.
        chat_template: Its Jinja template, which tells hermes from llama; None: there is none.
        tool_call_parser: ``--tool-call-parser``; None or "": by the model; "none": none.
        reasoning_parser: ``--reasoning-parser``; likewise.

    Raises:
        ConfigError: A name is unknown.
    """
    check_parser_names(tool_call_parser, reasoning_parser)
    return ParserChoice(reasoning_parser or NONE, tool_call_parser or NONE)


def check_parser_names(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Check two flags; None or "" leaves the choice to the model.

    Raises:
        ConfigError: A name is unknown.
    """
    for flag, name, known in (
        ("--tool-call-parser", tool_call_parser, TOOL_PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name and name != NONE and name not in known:
            raise ConfigError(
                f"{flag} {name!r} is unknown: use one of {', '.join(sorted(known))} or {NONE}."
            )
