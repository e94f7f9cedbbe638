"""From what a request asks for to the text that llguidance compiles."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.closed_objects import close_objects
from vllm.v1.structured_output.lax_schemas import is_lax, loosen
from vllm.v1.structured_output.limits import read_schema, read_structural_tag
from vllm.v1.structured_output.special_texts import SpecialTexts
from vllm.v1.structured_output.structural_tag import TagGrammar, TagText

# One space, or a line break with an indentation: whatever is printed for people fits, and a model
# cannot fill its answer with blanks.
_WHITESPACE = r"[ ]|\r?\n[ \t]{0,32}"

# The library's reader of GBNF is written in Python, and would hold up everybody else's.
_MAX_GBNF_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class GrammarText:
    """What llguidance compiles, and what it was made of.

    Attributes:
        text: The library's grammar.
        schema: The one that all of an answer follows; None: it follows something else.
        tag: The structural tag that it follows; None: likewise.
    """

    text: str
    schema: Mapping[str, Any] | None = None
    tag: TagText | None = None


def make_grammar_text(params: StructuredOutputsParams, specials: SpecialTexts) -> GrammarText:
    """Return llguidance's grammar.

    Args:
        params: What the request asks for.
        specials: The vocabulary's special tokens.

    Raises:
        UserInputError: It is malformed, as far as that shows here.
    """
    schema = _make_whole_schema(params)
    if schema is not None:
        return GrammarText(LLMatcher.grammar_from_json_schema(json.dumps(schema)), schema)
    if params.regex is not None:
        return GrammarText(LLMatcher.grammar_from_regex(params.regex))
    if params.choice is not None:
        options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in params.choice)
        return GrammarText(LLMatcher.grammar_from_lark(f"start: {options}"))
    if params.grammar is not None:
        return GrammarText(LLMatcher.grammar_from_lark(make_lark(params.grammar)))
    builder = TagGrammar(specials, lambda schema: make_schema(schema, params), make_lark)
    tag = builder.build(read_structural_tag(params.structural_tag or ""))
    return GrammarText(tag.text, tag=tag)


def _make_whole_schema(params: StructuredOutputsParams) -> dict[str, Any] | None:
    """The schema that all of an answer follows; None: it follows something else."""
    if params.json is not None:
        return make_schema(read_schema(params.json), params)
    return make_schema({}, params, "object") if params.json_object else None


def make_lark(grammar: str) -> str:
    """Return a Lark grammar; GBNF is turned into it.

    Raises:
        UserInputError: It is neither.
    """
    if is_lark_syntax(grammar):
        return grammar
    if len(grammar) > _MAX_GBNF_CHARS:
        raise UserInputError(
            f"structured_outputs.grammar has {len(grammar)} characters: at most {_MAX_GBNF_CHARS} "
            "are allowed in GBNF; write it in Lark.",
            "structured_outputs",
        )
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises bare Exception for what it cannot read
        raise UserInputError(
            f"structured_outputs.grammar is neither Lark nor GBNF: {error}.", "structured_outputs"
        ) from error


def make_schema(
    schema: Any, params: StructuredOutputsParams, of_type: str | None = None
) -> dict[str, Any]:
    """Return a schema with the options of the request; its own ``x-guidance`` goes before them.

    Raises:
        UserInputError: It is no object.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise UserInputError(
            f"structured_outputs.{params.kind}: a JSON schema must be an object, not "
            f"{str(schema)[:60]!r}.",
            "structured_outputs",
        )
    own = schema.get("x-guidance")
    if not isinstance(own, dict | None):
        raise UserInputError(
            f"structured_outputs.{params.kind} holds x-guidance={str(own)[:60]!r}, which must be "
            "an object.",
            "structured_outputs",
        )
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    made = {**schema, "x-guidance": {**options, **(own or {})}}
    if of_type is not None:
        made["type"] = of_type
    if is_lax(made):
        made = loosen(made)
    # A model asked for an object would go on with properties of its own making.
    return made if params.disable_additional_properties is False else close_objects(made)
