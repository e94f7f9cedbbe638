"""The grammars of answers that must call, or may call and else answer in a form.

Both are structural tags; their formats are those of docs/structured_output.md. Every argument
follows its schema, required ones are there, and nothing but calls, or the answer, follows the
reasoning.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from vllm.parser.field_grammars import gemma_call, glm_call, pythonic_call, qwen3_coder_call
from vllm.parser.grammar_formats import (
    ANY_TEXT,
    Field,
    Format,
    any_of,
    any_schema_of,
    arguments_of,
    calls_of,
    fields_of,
    is_text_enum,
    json_of,
    object_of,
    sequence,
    tag,
    takes_any_text,
    text,
)
from vllm.parser.tagged import ReasoningTags
from vllm.tokenizers.chat_tools import ToolSpec
from vllm.tokenizers.deepseek_v4_tools import BLOCK_GAP, DSML, V4_TAGS, V32_TAGS, V41_TAGS, DsmlTags


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer may be.

    Attributes:
        tools: Those that may be called; none: the answer has its form.
        form: Of an answer that does not call; None: it must call.
        one_call: Whether one call is all.
        thought: How a thought is tagged that the answer may begin with; None: none may come,
            for the model does not think, or has thought when the grammar begins.
        is_behind_thought: Whether a thought ends just before the grammar begins.
    """

    tools: Sequence[ToolSpec]
    form: Format | None = None
    one_call: bool = False
    thought: ReasoningTags | None = None
    is_behind_thought: bool = False


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a family writes what a grammar forces.

    Attributes:
        calls: The format of one call or several.
        breaks_behind_thought: Whether an empty line may stand between a thought and a call.
        answer_head: What an answer that is no call begins with.
    """

    calls: Callable[[Sequence[ToolSpec], bool], Format]
    breaks_behind_thought: bool = False
    answer_head: str = ""


def answer_tag(dialect: str, grammar: AnswerGrammar) -> str:
    """Return the structural tag of an answer that calls, or has its form."""
    said, before = _said(dialect, grammar), _before(dialect, grammar)
    whole = said if before is None else sequence(any_of(text(""), before), said)
    return json.dumps({"format": whole})


def _said(dialect: str, grammar: AnswerGrammar) -> Format:
    """The calls or the answer."""
    spelling = _SPELLINGS[dialect]
    if dialect == _LLAMA and grammar.form is not None and grammar.form["type"] == "json_schema":
        return _llama_or_json(grammar.tools, grammar.form)
    options: list[Format] = []
    if grammar.tools:
        options.append(spelling.calls(grammar.tools, grammar.one_call))
    if grammar.form is not None:
        head = [text(spelling.answer_head)] if spelling.answer_head else []
        options.append(sequence(*head, grammar.form))
    return options[0] if len(options) == 1 else any_of(*options)


def _before(dialect: str, grammar: AnswerGrammar) -> Format | None:
    """What may stand in front; None: nothing."""
    if dialect == _HARMONY:
        return _ANALYSIS
    if grammar.thought is not None:
        return _thought(grammar.thought)
    breaks = grammar.is_behind_thought and _SPELLINGS[dialect].breaks_behind_thought
    return text("\n\n") if breaks else None


def _thought(tags: ReasoningTags) -> Format:
    """A model whose prompt leaves the thought to it may open and close it first."""
    gap = any_of(text(""), text("\n"), text("\n\n"))
    return sequence(text(tags.start), ANY_TEXT, text(tags.end), gap)


def _deepseek(own: DsmlTags, tools: Sequence[ToolSpec], one_call: bool) -> Format:
    head, end = own.open("invoke"), own.close("invoke")
    tags = [
        tag(f'{head} name="{tool.name}">\n', _parameters(tool, own), f"{end}\n") for tool in tools
    ]
    opening = text(f"{BLOCK_GAP}{own.block_open}\n")
    return sequence(opening, calls_of(tags, "", one_call), text(own.block_close))


def _parameters(tool: ToolSpec, own: DsmlTags) -> Format:
    """The arguments of one call, in the order of their schema."""
    fields = fields_of(tool)
    if fields is None:
        # Too much for one parameter after another: all of them as one JSON object.
        return _json_parameter("arguments", arguments_of(tool), own)
    parts = [_parameter(field, own) for field in fields]
    return sequence(*parts) if parts else text("")


def _parameter(field: Field, own: DsmlTags) -> Format:
    options = [_json_parameter(field.name, field.json, own)]
    head = f'{own.open("parameter")} name="{field.name}" string="true">'
    end = f"{own.close('parameter')}\n"
    if takes_any_text(field.schema):
        options = [sequence(text(head), ANY_TEXT, text(end))]
    elif values := is_text_enum(field.schema, DSML):
        options = [text(f"{head}{value}{end}") for value in values]
    return any_of(*options) if field.is_required else any_of(*options, text(""))


def _json_parameter(name: str, value: Format, own: DsmlTags) -> Format:
    head = f'{own.open("parameter")} name="{name}" string="false">'
    return sequence(text(head), value, text(f"{own.close('parameter')}\n"))


def _hermes(tools: Sequence[ToolSpec], one_call: bool) -> Format:
    tags = [
        tag(
            f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            arguments_of(tool),
            "}\n</tool_call>",
        )
        for tool in tools
    ]
    return calls_of(tags, "\n", one_call)


def _llama(tools: Sequence[ToolSpec], one_call: bool) -> Format:
    tags = [
        tag(f'{{"name": {json.dumps(tool.name)}, "parameters": ', arguments_of(tool), "}")
        for tool in tools
    ]
    return calls_of(tags, "; ", one_call)


def _llama_or_json(tools: Sequence[ToolSpec], form: Format) -> Format:
    """One object: a call's or the answer's.

    Both begin with a brace, and grammars cannot tell a text ``{"name": `` from JSON that begins
    alike: so both are JSON here.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": object_of(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return json_of(any_schema_of([form["json_schema"], *calls]))


def _harmony_calls(tools: Sequence[ToolSpec], one_call: bool) -> Format:
    # The token that ends a call ends the answer: there is one call at most.
    tags = [
        tag(
            f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
            arguments_of(tool),
            "",
        )
        for tool in tools
    ]
    return any_of(*tags)


def _mistral(tools: Sequence[ToolSpec], one_call: bool) -> Format:
    tags = [
        tag(
            f'{{"name": {json.dumps(tool.name)}, "arguments": ',
            arguments_of(tool),
            "}",
        )
        for tool in tools
    ]
    return sequence(text("[TOOL_CALLS]["), calls_of(tags, ", ", one_call), text("]"))


def _mistral_named(tools: Sequence[ToolSpec], one_call: bool) -> Format:
    tags = [tag(f"[TOOL_CALLS]{tool.name}[ARGS]", arguments_of(tool), "") for tool in tools]
    return calls_of(tags, "", one_call)


def _kimi(tools: Sequence[ToolSpec], one_call: bool) -> Format:
    index: Format = {"type": "regex", "pattern": "[0-9]{1,4}"}
    tags = [
        tag(
            f"<|tool_call_begin|>functions.{tool.name}:",
            sequence(index, text("<|tool_call_argument_begin|>"), arguments_of(tool)),
            "<|tool_call_end|>",
        )
        for tool in tools
    ]
    return sequence(
        text("<|tool_calls_section_begin|>"),
        calls_of(tags, "", one_call, number_behind=":"),
        text("<|tool_calls_section_end|>"),
    )


def _deepseek_v3(tools: Sequence[ToolSpec], one_call: bool, *, has_fences: bool) -> Format:
    begin, separator = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    end = "<｜tool▁call▁end｜>"
    if has_fences:
        begin, separator, end = f"{begin}function{separator}", "\n```json\n", f"\n```{end}"
    tags = [tag(f"{begin}{tool.name}{separator}", arguments_of(tool), end) for tool in tools]
    calls = calls_of(tags, "\n" if has_fences else "", one_call)
    return sequence(text("<｜tool▁calls▁begin｜>"), calls, text("<｜tool▁calls▁end｜>"))


def _listed(
    one: Callable[[ToolSpec], Format], separator: str, head: str = "", end: str = ""
) -> Callable[[Sequence[ToolSpec], bool], Format]:
    """The format of calls that are written one by one."""

    def calls(tools: Sequence[ToolSpec], one_call: bool) -> Format:
        tags = [tag("", one(tool), "") for tool in tools]
        listed = calls_of(tags, separator, one_call)
        return sequence(text(head), listed, text(end)) if head or end else listed

    return calls


_LLAMA, _HARMONY = "llama3_json", "openai"
_ANALYSIS = sequence(
    text("<|channel|>analysis<|message|>"), ANY_TEXT, text("<|end|><|start|>assistant")
)
_HERMES = _Spelling(_hermes, breaks_behind_thought=True)
_SPELLINGS: Mapping[str, _Spelling] = {
    "deepseek_v3": _Spelling(partial(_deepseek_v3, has_fences=True)),
    "deepseek_v31": _Spelling(partial(_deepseek_v3, has_fences=False)),
    "deepseek_v32": _Spelling(partial(_deepseek, V32_TAGS)),
    "deepseek_v4": _Spelling(partial(_deepseek, V4_TAGS)),
    "deepseek_v41": _Spelling(partial(_deepseek, V41_TAGS)),
    "gemma4": _Spelling(_listed(gemma_call("<|tool_call>", "<tool_call|>", '<|"|>'), "")),
    "functiongemma": _Spelling(
        _listed(gemma_call("<start_function_call>", "<end_function_call>", "<escape>"), "")
    ),
    "glm": _Spelling(_listed(glm_call, "\n"), breaks_behind_thought=True),
    "hermes": _HERMES,
    "kimi_k2": _Spelling(_kimi, breaks_behind_thought=True),
    _LLAMA: _Spelling(_llama),
    "mistral": _Spelling(_mistral),
    "mistral_v11": _Spelling(_mistral_named),
    _HARMONY: _Spelling(_harmony_calls, answer_head="<|channel|>final<|message|>"),
    "pythonic": _Spelling(_listed(pythonic_call, ", ", "[", "]")),
    "qwen3": _HERMES,
    "qwen3_coder": _Spelling(_listed(qwen3_coder_call, "\n"), breaks_behind_thought=True),
}
