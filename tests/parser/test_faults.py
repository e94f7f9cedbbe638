"""What models really write: each kind of fault over the families, whole and letter by letter."""

import json
import re
from typing import Any

import pytest

from tests.parser.reading import D, options, told_calls
from vllm.parser.interface import ToolUse, new_call_id
from vllm.parser.pieces import AnswerBuilder, ParsedAnswer, Piece, ToolCallStart
from vllm.parser.registry import ParserChoice
from vllm.tokenizers.chat_tools import ToolSpec, parse_tools

Q = '<|"|>'
CHOICES = {
    "deepseek_v4": ParserChoice("deepseek_v4", "deepseek_v4"),
    "qwen3": ParserChoice("qwen3", "qwen3"),
    "hermes": ParserChoice("qwen3", "hermes"),
    "qwen3_coder": ParserChoice("qwen3", "qwen3_coder"),
    "glm": ParserChoice("glm", "glm"),
    "kimi_k2": ParserChoice("kimi_k2", "kimi_k2"),
    "deepseek_v3": ParserChoice("deepseek_v4", "deepseek_v3"),
    "deepseek_v31": ParserChoice("deepseek_v4", "deepseek_v31"),
    "mistral": ParserChoice("mistral", "mistral"),
    "mistral_v11": ParserChoice("mistral", "mistral_v11"),
    "gemma4": ParserChoice("gemma4", "gemma4"),
    "functiongemma": ParserChoice("none", "functiongemma"),
    "llama3_json": ParserChoice("none", "llama3_json"),
    "pythonic": ParserChoice("none", "pythonic"),
    "openai": ParserChoice("openai_gptoss", "openai"),
}
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


def tools(*names: str, **properties: Any) -> tuple[ToolSpec, ...]:
    """Functions with these properties; ``root`` adds to the schema's root."""
    root = properties.pop("root", {})
    schema = {"type": "object", "properties": properties, **root}
    return parse_tools(
        [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name in names or ("f",)
        ]
    )


SHELL = tools("f", "g", cmd={"type": "string"}, n={"type": "integer"})


def read(family: str, text: str, own: tuple[ToolSpec, ...], **fields: Any) -> ParsedAnswer:
    """The answer, read whole, letter by letter and in parts of seven: one and the same."""
    reason = fields.pop("reason", "stop")
    ways = []
    for length in (len(text) or 1, 1, 7):
        parser = CHOICES[family].make_parser(options(tools=own, **fields))
        pieces: list[Piece] = []
        for at in range(0, len(text), length):
            pieces += parser.feed(text[at : at + length], [])
        pieces += parser.finish(reason)
        builder = AnswerBuilder()
        builder.add(pieces)
        ways.append((builder.answer, told_calls(pieces)))
    assert ways[0] == ways[1] == ways[2]
    answer, calls = ways[0]
    whole = [(name, arguments) for name, arguments, is_whole in calls if is_whole]
    assert whole == [(call.name, call.arguments) for call in answer.tool_calls]
    names = {tool.name for tool in own}
    assert all(NAME.fullmatch(name) and name in names for name, _, _ in calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole)
    return answer


def calls_of(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


# How families that do not say what a value is write one field of a call.
FIELD = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter={k}>\n{v}\n</parameter>\n</function>\n"
    "</tool_call>",
    "hermes": "<tool_call>\n<function=f>\n<parameter={k}>\n{v}\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>f\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>",
    "deepseek_v4": f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="{{k}}">{{v}}'
    f"</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>",
}
DEFS = {"$defs": {"Id": {"type": "string"}, "N": {"type": "integer"}, "Up": {"$ref": "#/$defs/Id"}}}
TEXT_OR_NULL = {"type": ["string", "null"]}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
# Schema of the field, what else the root says, the value as written, what it means.
VALUES = [
    # 1: a bare value is typed by all of its schema
    (TEXT_OR_NULL, {}, "null", None),
    (OPTIONAL, {}, "null", None),
    ({"oneOf": [{"type": "null"}, {"type": "string"}]}, {}, "null", None),
    ({"type": ["number", "null"]}, {}, "null", None),
    ({"type": "string", "nullable": True}, {}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]}, DEFS, "null", None),
    ({"type": ["string", "null"], "enum": ["a", None]}, {}, "null", None),
    (TEXT_OR_NULL, {}, "None", None),
    (TEXT_OR_NULL, {}, "nullable", "nullable"),
    (TEXT_OR_NULL, {}, "nul", "nul"),
    (TEXT_OR_NULL, {}, "7", "7"),
    (TEXT_OR_NULL, {}, "true", "true"),
    (OPTIONAL, {}, '{"a": 1}', '{"a": 1}'),
    (OPTIONAL, {}, '"quoted"', '"quoted"'),
    ({"type": "string"}, {}, "null", "null"),
    ({"type": "string"}, {}, "None", "None"),
    ({"type": "string", "default": None}, {}, "null", "null"),
    # 2: unions, references and choices
    ({"anyOf": [{"type": "object"}, {"type": "string"}]}, {}, '{"a": 1}', {"a": 1}),
    ({"type": ["array", "string"]}, {}, '["x"]', ["x"]),
    ({"type": ["array", "string"]}, {}, "[x", "[x"),
    ({"type": ["array", "string"]}, {}, "['x', 'y']", ["x", "y"]),
    ({"$ref": "#/$defs/Id"}, DEFS, "7", "7"),
    ({"allOf": [{"$ref": "#/$defs/Id"}]}, DEFS, "7", "7"),
    ({"$ref": "#/$defs/Up"}, DEFS, "true", "true"),
    ({"$ref": "#/$defs/N"}, DEFS, "7", 7),
    ({"allOf": [{"$ref": "#/$defs/N"}, {"minimum": 1}]}, DEFS, "7", 7),
    ({"type": ["integer", "string"]}, {}, "7", 7),
    ({"type": ["integer", "string"]}, {}, "7a", "7a"),
    ({"type": ["integer", "string"]}, {}, "7.5", "7.5"),
    ({"type": ["boolean", "string"]}, {}, "True", True),
    ({"type": "boolean"}, {}, "False", False),
    ({"type": "boolean"}, {}, "true", True),
    ({"type": "null"}, {}, "None", None),
    ({"enum": [1, 2, "auto"]}, {}, "1", 1),
    ({"enum": [1, 2, "auto"]}, {}, "auto", "auto"),
    ({"enum": ["1", "2"]}, {}, "1", "1"),
    ({"const": "5"}, {}, "5", "5"),
    ({"const": 5}, {}, "5", 5),
    ({"type": "string", "enum": ["a", "b"]}, {}, "a", "a"),
    ({"type": "string", "enum": ["a", "b"]}, {}, '"a"', "a"),
    ({"type": "array", "items": {"type": "integer"}}, {}, "[1, 2]", [1, 2]),
    ({"type": "array"}, {}, "('x', None)", ["x", None]),
    ({"type": "object"}, {}, "{'a': True, 'b': [1,],}", {"a": True, "b": [1]}),
    (
        {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "string"}]},
        {},
        '{"b": 1}',
        '{"b": 1}',
    ),
    ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}, {}, "[1]",
     "[1]"),
    ({}, {}, "so so", "so so"),
    ({}, {}, "[1]", [1]),
    (True, {}, "7", 7),
    ({"type": "str"}, {}, "7", "7"),
    ({"$ref": "#/$defs/Missing"}, DEFS, "7", 7),
    ({"$ref": "#"}, {}, '{"v": 1}', {"v": 1}),
]  # fmt: skip


@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize(("schema", "root", "written", "value"), VALUES)
def test_a_value_is_what_its_schema_has_room_for(family, schema, root, written, value):
    text = FIELD[family].replace("{k}", "v").replace("{v}", written)
    answer = read(family, text, tools("f", v=schema, root=root))
    assert calls_of(answer) == [("f", {"v": value})]
    assert answer.content == ""


ROOTS = [
    ({"patternProperties": {"^x_": {"type": "string"}}}, "x_id", "7", "7"),
    ({"patternProperties": {"^x_": {"type": "string"}}}, "id", "7", 7),
    ({"additionalProperties": {"type": "string"}}, "id", "7", "7"),
    ({"additionalProperties": {"type": ["string", "null"]}}, "id", "null", None),
    ({"allOf": [{"properties": {"id": {"type": "string"}}}]}, "id", "7", "7"),
    ({"anyOf": [{"properties": {"id": {"type": "string"}}}, {"required": ["n"]}]}, "id", "7", "7"),
    ({"oneOf": [{"properties": {"id": {"type": "string"}}},
                {"properties": {"id": {"type": "integer"}}}]}, "id", "7", 7),
    ({"oneOf": [{"properties": {"id": {"type": "string"}}},
                {"properties": {"id": {"type": "null"}}}]}, "id", "null", None),
    ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"id": {"type": "string"}}}}}, "id", "7",
     "7"),
    ({"if": {}, "then": {"properties": {"id": {"type": "string"}}}}, "id", "7", "7"),
    ({"patternProperties": {"(a+)+$": {"type": "string"}}}, "a" * 40 + "!", "7", 7),
]  # fmt: skip


@pytest.mark.parametrize("family", FIELD)
@pytest.mark.parametrize(("root", "key", "written", "value"), ROOTS)
def test_a_field_is_found_wherever_the_schema_speaks_of_it(family, root, key, written, value):
    text = FIELD[family].replace("{k}", key).replace("{v}", written)
    assert calls_of(read(family, text, tools("f", root=root))) == [("f", {key: value})]


def test_what_the_model_calls_a_text_is_one():
    text = FIELD["deepseek_v4"].replace('name="{k}"', 'name="v" string="true"')
    answer = read("deepseek_v4", text.replace("{v}", "null"), tools("f", v=TEXT_OR_NULL))
    assert calls_of(answer) == [("f", {"v": "null"})]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm", "deepseek_v4"])
@pytest.mark.parametrize("schema", [TEXT_OR_NULL, OPTIONAL, {"type": ["array", "string"]}, {}])
def test_a_text_is_held_back_only_while_it_may_be_something_else(family, schema):
    text = FIELD[family].replace("{k}", "v").replace("{v}", "nothing of this waits")
    parser = CHOICES[family].make_parser(options(tools=tools("f", v=schema)))
    pieces = parser.feed(text[: text.index(" waits")], [])
    assert "nothing of" in "".join(getattr(piece, "text", "") for piece in pieces)


# ---- 3, 4: other quotes, near misses -------------------------------------------------------------

LOOSE = tools(
    "f",
    opts={"type": "object"},
    ids={"type": "array", "items": {"type": "string"}},
    cmd={"type": "string"},
    n={"type": "integer"},
)
GEMMA = [
    ('call:f{opts:{"mode": "fast"},ids:["a, b","c"]}', {"opts": {"mode": "fast"},
                                                        "ids": ["a, b", "c"]}),
    ("call:f{ids:['x','y, z']}", {"ids": ["x", "y, z"]}),
    ('call:f{"cmd": "ls"}', {"cmd": "ls"}),
    ("call:f{'cmd': 'it\\'s'}", {"cmd": "it's"}),
    ('call:f{cmd:"a, b",n:3}', {"cmd": "a, b", "n": 3}),
    ('call:f{cmd="ls",n=3}', {"cmd": "ls", "n": 3}),
    ('call:f{cmd: "say \\"hi\\"", n: 3}', {"cmd": 'say "hi"', "n": 3}),
    ("call:f{cmd:ls -la,n:3}", {"cmd": "ls -la", "n": 3}),
    ("call:f{cmd:7}", {"cmd": "7"}),
    ("call:f{opts:{a:True,b:None,c:[1,2,]}}", {"opts": {"a": True, "b": None, "c": [1, 2]}}),
    ("call:f{opts:{}}", {"opts": {}}),
    (f"call:f{{opts:{{a:{Q}x, y{Q}}},ids:[{Q}a{Q},\"b\"]}}", {"opts": {"a": "x, y"},
                                                             "ids": ["a", "b"]}),
    (f"call:f(cmd:{Q}ls{Q})", {"cmd": "ls"}),
    ('call:f(cmd="ls", n=3)', {"cmd": "ls", "n": 3}),
    ('f{cmd:"ls"}', {"cmd": "ls"}),
    ('call:f {cmd:"ls"}', {"cmd": "ls"}),
    ('{"name": "f", "arguments": {"cmd": "ls"}}', {"cmd": "ls"}),
    ("{'name': 'f', 'arguments': {'cmd': 'ls'}}", {"cmd": "ls"}),
    ('call:f({"cmd": "ls"})', {"cmd": "ls"}),
]  # fmt: skip


@pytest.mark.parametrize("family", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(("said", "arguments"), GEMMA)
def test_quotes_that_are_not_the_formats(family, said, arguments):
    text = f"<|tool_call>{said}<tool_call|>"
    if family == "functiongemma":
        marks = ("<|tool_call>", "<start_function_call>"), ("<tool_call|>", "<end_function_call>")
        for mark, other in (*marks, (Q, "<escape>")):
            text = text.replace(mark, other)
    answer = read(family, text, LOOSE)
    assert calls_of(answer) == [("f", arguments)]
    assert answer.content == ""


@pytest.mark.parametrize(
    "said",
    [
        "call:f{ids:['it's']}",
        'call:f{cmd:"a" b}',
        "call:f{cmd:[1,2}",
        f"call:f{{cmd:{Q}ls",
        "call:f{cmd}",
        "call:f{cmd:}",
        "call:f[ls]",
        "f",
        "run ls",
        'call:nope{cmd:"ls"}',
    ],
)
def test_what_cannot_be_read_is_no_call_and_is_told(said):
    answer = read("gemma4", f"So.<|tool_call>{said}<tool_call|>", LOOSE)
    assert answer.tool_calls == []
    assert answer.content.startswith("So.")
    assert re.sub(r"\W", "", said) in re.sub(r"\W", "", answer.content)


# Marks before and behind a body, by family.
BODIES = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "qwen3": ("<tool_call>\n", "\n</tool_call>"),
    "qwen3_coder": ("<tool_call>\n", "\n</tool_call>"),
    "glm": ("<tool_call>", "</tool_call>"),
    "deepseek_v4": (f"\n\n<{D}tool_calls>\n", f"\n</{D}tool_calls>"),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral": ("[TOOL_CALLS]", ""),
    "mistral_v11": ("[TOOL_CALLS]", ""),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "functiongemma": ("<start_function_call>", "<end_function_call>"),
    "openai": ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|call|>"),
}
ANY_BODY = [
    '{"name": "f", "arguments": {"cmd": "ls", "n": 3}}',
    '{"name": "f", "parameters": {"cmd": "ls", "n": 3}}',
    '{"arguments": {"cmd": "ls", "n": 3}, "name": "f"}',
    '{"name": "f", "arguments": "{\\"cmd\\": \\"ls\\", \\"n\\": 3}"}',
    "{'name': 'f', 'arguments': {'cmd': 'ls', 'n': 3}}",
    '{"name": "f", "arguments": {\'cmd\': "ls", "n": 3,}}',
    '{"type": "function", "function": {"name": "f", "arguments": {"cmd": "ls", "n": 3}}}',
    'f(cmd="ls", n=3)',
    "f(cmd='ls', n=3)",
    '[f(cmd="ls", n=3)]',
    'f({"cmd": "ls", "n": 3})',
    'f{"cmd": "ls", "n": 3}',
    'f\n{"cmd": "ls", "n": 3}',
    'functions.f{"cmd": "ls", "n": 3}',
    'call:f{cmd:"ls",n:3}',
    '[{"name": "f", "arguments": {"cmd": "ls", "n": 3}}]',
    '```json\n{"name": "f", "arguments": {"cmd": "ls", "n": 3}}\n```',
]


@pytest.mark.parametrize("family", [name for name in BODIES if name != "openai"])
@pytest.mark.parametrize("body", ANY_BODY)
def test_a_near_miss_is_a_call_where_its_meaning_is_plain(family, body):
    before, behind = BODIES[family]
    answer = read(family, f"So.{before}{body}{behind}", SHELL)
    assert calls_of(answer) == [("f", {"cmd": "ls", "n": 3})]
    assert answer.content == "So."


BESIDE = [
    ("kimi_k2", '<|tool_calls_section_begin|>{"name": "f", "arguments": {"cmd": "ls"}}'
     "<|tool_calls_section_end|>"),
    ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"cmd": "ls"}'
     "<|tool_call_end|>"),
    ("kimi_k2", '<|tool_calls_section_begin|>functions.f:0<|tool_call_argument_begin|>'
     '{"cmd": "ls"}<|tool_call_end|><|tool_calls_section_end|>'),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0{"cmd": "ls"}'
     "<|tool_call_end|><|tool_calls_section_end|>"),
    ("openai", '<|channel|>commentary to=f<|message|>{"cmd": "ls"}<|call|>'),
    ("openai", "<|channel|>commentary to=functions.f<|message|>{'cmd': 'ls',}<|call|>"),
    ("llama3_json", '<function=f>{"cmd": "ls"}</function>'),
    ("llama3_json", "{'name': 'f', 'parameters': {'cmd': 'ls'}}"),
    ("llama3_json", '{"function": "f", "args": {"cmd": "ls"}}'),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"cmd": "ls"}}'),
    ("pythonic", '[{"name": "f", "arguments": {"cmd": "ls"}}]'),
    ("pythonic", '<|python_start|>[f(cmd="ls")]<|python_end|>'),
    ("qwen3_coder", "<function=f>\n<parameter=cmd>\nls\n</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=cmd>\nls\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=cmd>\nls\n</parameter>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<tool_call>\n<function=f>\n<parameter=cmd>\nls\n</parameter>\n"
     "</function>\n</tool_call>"),
    ("qwen3_coder", '<tool_call>\n<function="f">\n<parameter="cmd">\nls\n</parameter>\n'
     "</function>\n</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"cmd": "ls"}}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"cmd": "ls"}\n</tool_call>'),
    ("glm", "<tool_call>f<arg_key>cmd</arg_key><arg_value>ls</tool_call>"),
    ("gemma4", f"<|tool_call>call:f{{{Q}cmd{Q}:{Q}ls{Q}}}<tool_call|>"),
    ("gemma4", f"<|tool_call>call:f{{cmd:{Q}ls{Q}}}"),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"cmd": "ls"}[TOOL_CALLS]'),
    ("deepseek_v4", f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="cmd" '
     f'string="true">ls</{D}invoke>\n</{D}tool_calls>'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text"), BESIDE)
def test_calls_without_some_of_their_tags(family, text):
    answer = read(family, text, SHELL)
    assert calls_of(answer) == [("f", {"cmd": "ls"})]
    assert answer.content == ""


@pytest.mark.parametrize("behind", ["\n```json\n{}\n```", "\n```json\n```", "\n{}", "```{}```", ""])
def test_the_name_behind_deepseeks_head_ends_before_a_break_or_a_fence(behind):
    before, after = BODIES["deepseek_v31"]
    call = f"{before}function<｜tool▁sep｜>to_json{behind}{after}"
    answer = read("deepseek_v3", call, tools("to_json"))
    assert calls_of(answer) == [("to_json", {})]


UNREADABLE = [
    "I would call f with ls",
    '{"name": "nope", "arguments": {"cmd": "ls"}}',
    '{"name": "f", "arguments": {"cmd": ls}}',
    '{"name": "f", "arguments": {"cmd": "ls"}, "why": "to see"}',
    '{"name": "f", "cmd": "ls"}',
    '{"cmd": "ls"}',
    '{"name": "f", "arguments": "ls"}',
    '{"name": "f", "arguments": ["ls"]}',
    "{'name': 'f', 'arguments': {'cmd': 'it's'}}",
    "f(ls)",
    'nope(cmd="ls")',
    'f(cmd="ls") and more',
    "f: ls",
    "print('ls')",
    "{ls}",
    "[ls]",
    '"ls"',
    "```\nls\n```",
]


@pytest.mark.parametrize("family", [*BODIES, "llama3_json", "pythonic"])
@pytest.mark.parametrize("body", UNREADABLE)
def test_an_answer_that_says_something_is_never_told_as_nothing(family, body):
    before, behind = BODIES.get(family, ("", ""))
    heard: list[Any] = []
    answer = read(family, f"{before}{body}{behind}", SHELL, on_malformed=heard.append)
    if family == "openai" and body == '{"cmd": "ls"}':
        assert calls_of(answer) == [("f", {"cmd": "ls"})]
        return
    if family == "openai" and body.startswith("{"):
        # Its body is the arguments: an object of whatever keys is one.
        assert answer.tool_calls or body in answer.content
        return
    assert answer.tool_calls == []
    assert body in answer.content
    assert family in ("llama3_json", "pythonic") or heard


@pytest.mark.parametrize("use", [ToolUse.OFF, ToolUse.DROP])
@pytest.mark.parametrize("family", BODIES)
def test_forbidden_calls_are_told_where_nothing_else_is(family, use):
    before, behind = BODIES[family]
    body = '{"cmd": "ls"}' if family == "openai" else ANY_BODY[0]
    answer = read(family, f"{before}{body}{behind}", SHELL, tool_use=use)
    assert answer.tool_calls == []
    assert body in answer.content
    if use is ToolUse.DROP and family != "openai":
        assert read(family, f"So.{before}{body}{behind}", SHELL, tool_use=use).content == "So."


# ---- 5: names and arguments ----------------------------------------------------------------------

ODD_NAMES = [
    ("glm", "<tool_call>tool_12</arg_value>\n</tool_call>"),
    ("glm", "<tool_call>fcmd</arg_key><arg_value>ls</arg_value></tool_call>"),
    ("glm", "<tool_call>I will list the files.</tool_call>"),
    ("glm", "<tool_call>f g\n<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>"),
    ("glm", "<tool_call>F\n<arg_key>cmd</arg_key><arg_value>ls</arg_value></tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f cmd>\nls\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nls\n</function>\n</tool_call>"),
    ("qwen3_coder", '<tool_call>\n<function=f>\n"ls"\n</function>\n</tool_call>'),
    ("qwen3_coder", "<function=f>\n<cmd>ls</cmd>\n</function>"),
    ("qwen3_coder", "<function=f>\n<parameter=cmd>\nls\n</parameter>\nand more\n</function>"),
    ("qwen3_coder", "<function=f>\nfirst <parameter=cmd>\nls\n</parameter>\n</function>"),
    ("qwen3_coder", "<function=nope>\n<parameter=cmd>\nls\n</parameter>\n</function>"),
    ("hermes", '<tool_call>\n{"name": "f g", "arguments": {"cmd": "ls"}}\n</tool_call>'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>call_ab12"
     '<|tool_call_argument_begin|>{"cmd": "ls"}<|tool_call_end|><|tool_calls_section_end|>'),
    ("mistral_v11", '[TOOL_CALLS]f g[ARGS]{"cmd": "ls"}'),
    ("openai", '<|channel|>commentary to=functions.nope<|message|>{"cmd": "ls"}<|call|>'),
    ("pythonic", '[os.system(cmd="ls")]'),
    ("llama3_json", '{"name": "f.g", "parameters": {"cmd": "ls"}}'),
    ("deepseek_v4", f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\nls\n</{D}invoke>'),
    ("deepseek_v4", f'\n\n<{D}tool_calls>\n<{D}invoke name="no">\n<{D}parameter name="cmd" '
     f'string="true">ls</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text"), ODD_NAMES)
def test_what_is_no_call_of_a_tool_is_text(family, text):
    answer = read(
        family, "So." + text if family not in ("pythonic", "llama3_json") else text, SHELL
    )
    assert answer.tool_calls == []
    said = [word for word in re.findall(r"\w+", text) if not word.startswith("tool_calls")]
    assert all(word in answer.content for word in said)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_coder", '<tool_call>\n<function=f>\n{"cmd": "ls"}\n</function>\n</tool_call>'),
        ("qwen3_coder", "<function=f>\n{'cmd': 'ls'}\n</function>"),
        ("qwen3_coder", '<function=f>{"name": "f", "arguments": {"cmd": "ls"}}</function>'),
        ("hermes", '<tool_call>\n<function=f>\n{"cmd": "ls"}\n</function>\n</tool_call>'),
        ("glm", '<tool_call>\n<function=f>\n{"cmd": "ls"}\n</function>\n</tool_call>'),
        ("glm", '<tool_call>f{"cmd": "ls"}</tool_call>'),
        ("deepseek_v4", f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n{{"cmd": "ls"}}\n'
         f"</{D}invoke>\n</{D}tool_calls>"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>{'cmd': 'ls'}<|call|>"),
    ],
)  # fmt: skip
def test_arguments_in_another_spelling_are_not_thrown_away(family, text):
    answer = read(family, text, SHELL)
    assert calls_of(answer) == [("f", {"cmd": "ls"})]
    assert answer.content == ""


# ---- 6: thoughts ---------------------------------------------------------------------------------

THOUGHTS = [
    ("<think>a</think>one<think>b</think>two", "onetwo", "ab"),
    ("one<think>b</think>two", "onetwo", "b"),
    ("<think>a</think><think>b</think>two", "two", "ab"),
    ("b</think>two", "two", "b"),
    ("<think>a</think>b</think>two", "two", "ab"),
    ("one<think>b", "one", "b"),
    ("</think>two", "two", ""),
    ("<think>a<think>b</think>two", "two", "ab"),
    ("<think>a</think>one</think>two<think>c</think>three", "twothree", "aonec"),
]
REASONERS = ["deepseek_v4", "qwen3", "hermes", "qwen3_coder", "glm", "kimi_k2", "mistral", "gemma4"]
TAGS = {"mistral": ("[THINK]", "[/THINK]"), "gemma4": ("<|channel>thought\n", "<channel|>")}


def in_tags(family: str, text: str) -> str:
    start, end = TAGS.get(family, ("<think>", "</think>"))
    return text.replace("</think>", end).replace("<think>", start)


@pytest.mark.parametrize("family", REASONERS)
@pytest.mark.parametrize(("text", "content", "reasoning"), THOUGHTS)
def test_thoughts_stand_anywhere(family, text, content, reasoning):
    answer = read(family, in_tags(family, text), SHELL)
    assert (answer.content, answer.reasoning) == (content, reasoning)
    opened = read(family, in_tags(family, "x</think>" + text), SHELL, in_reasoning=True)
    assert (opened.content, opened.reasoning) == (content, "x" + reasoning)


WHOLE = {
    family: before + ANY_BODY[0] + behind
    for family, (before, behind) in BODIES.items()
    if family != "openai"
}


@pytest.mark.parametrize("family", REASONERS)
def test_a_thought_behind_a_call_is_one(family):
    call = WHOLE[family]
    for text, content, reasoning in (
        ("<think>a</think>one" + call + "<think>b</think>two", "onetwo", "ab"),
        (call + "b</think>two", "two", "b"),
        ("<think>a</think>" + call + "<think>b", "", "ab"),
        (call + "<think>b</think>" + call, "", "b"),
    ):
        answer = read(family, in_tags(family, text), SHELL)
        assert (answer.content, answer.reasoning) == (content, reasoning)
        assert len(answer.tool_calls) == text.count(call)


# ---- 7: ids --------------------------------------------------------------------------------------


def ids_of(family: str, text: str, **fields: Any) -> list[str]:
    fields = {"new_call_id": new_call_id, **fields}
    pieces = CHOICES[family].make_parser(options(tools=SHELL, **fields)).feed(text, [])
    return [piece.id for piece in pieces if isinstance(piece, ToolCallStart)]


def kimi(*ids: str) -> str:
    begin, argument = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    calls = "".join(f"{begin}{call_id}{argument}{{}}<|tool_call_end|>" for call_id in ids)
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:3", "functions.g:4"], ["functions.f:3", "functions.g:4"]),
        (["functions.f:1", "functions.f:1", "functions.f:1"],
         ["functions.f:1", "functions.f:2", "functions.f:3"]),
        (["f", "f"], ["functions.f:0", "functions.f:1"]),
        (["functions.f", "g:0"], ["functions.f:0", "functions.g:1"]),
    ],
)  # fmt: skip
def test_ids_are_unique_and_the_familys_own(given, ids):
    told = ids_of("kimi_k2", kimi(*given))
    assert len(set(told)) == len(given)
    assert told[0] == ids[0]
    assert all(re.fullmatch(r"functions\.[fg]:\d+", call_id) for call_id in told)


def test_ids_have_the_form_that_the_api_takes():
    form = re.compile(r"[a-zA-Z0-9_-]+")
    told = ids_of("kimi_k2", kimi("functions.f:0", "functions.f:1"),
                  accepts_id=lambda call_id: form.fullmatch(call_id) is not None)  # fmt: skip
    assert len(set(told)) == 2
    assert all(form.fullmatch(call_id) for call_id in told)
    twice = "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{}"
    first, second = ids_of("mistral_v11", twice)
    assert first == "a1b2c3d4e" != second
    hermes = '<tool_call>\n{"name": "f", "arguments": {}, "id": "x y\\n"}\n</tool_call>'
    assert ids_of("hermes", hermes)[0].startswith("call_")


# ---- 8, 9: tags inside values --------------------------------------------------------------------

ENDS = {
    "qwen3_coder": ("</parameter>", "</function>", "</tool_call>", "<parameter=n>"),
    "hermes": ("</parameter>", "</function>", "</tool_call>", "<parameter=n>"),
    "glm": ("</arg_value>", "</tool_call>", "<arg_key>n</arg_key>"),
    "deepseek_v4": (f"</{D}parameter>", f"</{D}invoke>"),
}
AROUND = ['echo "{}" > x', "grep -c '{}' *.xml", "{} x", "a{}b", "x {}\ny", "a\n{}.\nb", "{}{} x",
          "({})"]  # fmt: skip


INSIDE = [
    (family, tag, around.replace("{}", tag))
    for family, tags in ENDS.items()
    for tag in tags
    for around in AROUND
    # At the beginning of a line it begins a field.
    if not (tag.startswith("<parameter=") and f"\n{tag}" in "\n" + around.replace("{}", tag))
]


@pytest.mark.parametrize(("family", "tag", "value"), INSIDE)
def test_a_tag_in_a_value_is_text(family, tag, value):
    text = FIELD[family].replace("{k}", "cmd").replace("{v}", value)
    answer = read(family, text, SHELL)
    assert calls_of(answer) == [("f", {"cmd": value})]
    assert answer.content == ""


@pytest.mark.parametrize("family", ENDS)
def test_a_value_that_is_open_makes_no_whole_call(family):
    end = ENDS[family][0]
    text = FIELD[family].replace("{k}", "cmd").replace("{v}", f'echo "{end}" > x')
    for cut in range(text.index("echo"), text.rindex(end) + len(end)):
        assert read(family, text[:cut], SHELL).tool_calls == []
        assert read(family, text[:cut], SHELL, reason="length").tool_calls == []


MAP = {"type": "object", "additionalProperties": {"type": "string"}}
FORCED = {
    "qwen3_coder": FIELD["qwen3_coder"],
    "hermes": FIELD["hermes"],
    "glm": FIELD["glm"],
    "deepseek_v4": FIELD["deepseek_v4"].replace('name="{k}"', 'name="{k}" string="false"'),
}


@pytest.mark.parametrize("family", FORCED)
@pytest.mark.parametrize("around", ["{}", "{}\n", "{}{}", 'a "{}" b', "{}\\"])
def test_forced_json_is_read_as_json(family, around):
    closing = FORCED[family].split("{v}")[1]
    for inner in (closing.strip(), ENDS[family][0]):
        value = {"get": around.replace("{}", inner)}
        text = FORCED[family].replace("{k}", "v").replace("{v}", json.dumps(value))
        text = text.replace("\\uff5c", "｜")
        assert calls_of(read(family, text, tools("f", v=MAP))) == [("f", {"v": value})]


@pytest.mark.parametrize("family", FORCED)
@pytest.mark.parametrize(
    ("schema", "written"),
    [
        (MAP, '{"get_price": "de'),
        (MAP, '{"get_price"\n: "de"'),
        (MAP, "nothing"),
        ({"type": "integer"}, "many"),
        ({"type": "integer"}, "7 or 8"),
        ({"type": "array"}, "[1, 2"),
        ({"type": "array"}, "x, y"),
        ({"type": "boolean"}, "yes"),
        ({"type": ["number", "null"]}, "-"),
        ({"$ref": "#/$defs/N"}, "seven"),
    ],
)
def test_what_is_no_value_of_its_schema_makes_no_whole_call(family, schema, written):
    text = FORCED[family].replace("{k}", "v").replace("{v}", written)
    answer = read(family, text, tools("f", v=schema, root=DEFS))
    assert answer.tool_calls == []
    assert written in answer.content


@pytest.mark.parametrize("family", ["hermes", "qwen3", "kimi_k2", "mistral", "openai"])
@pytest.mark.parametrize("around", ["{}", 'say "{}"', "{}{}", "a\n{}\nb"])
def test_marks_in_texts_of_json_are_text(family, around):
    before, behind = BODIES[family]
    for mark in {behind, before, "<|tool_call_end|>", "</tool_call>"}:
        arguments = json.dumps({"cmd": around.replace("{}", mark.strip())})
        body = arguments if family == "openai" else f'{{"name": "f", "arguments": {arguments}}}'
        answer = read(family, f"{before}{body}{behind}", SHELL)
        assert calls_of(answer) == [("f", json.loads(arguments))]


# ---- 10: Python's syntax, JSON's escapes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'"\ud83d\ude0a"', "\U0001f60a"),
        (r"'\ud83d\ude0a!'", "\U0001f60a!"),
        (r'"\u00e9\U0001f60a\x41"', "é\U0001f60aA"),
        (r'["\ud83d\ude0a", {"k": "\ud83d\ude0a"}]', ["\U0001f60a", {"k": "\U0001f60a"}]),
        (r'{"\ud83d\ude0a": 1}', {"\U0001f60a": 1}),
        ('"a\nb"', "a\nb"),
        (r'"a\/b"', "a/b"),
        ("true", True),
        ("None", None),
        ("-5", -5),
        ("(1, 'x')", [1, "x"]),
        ('"\U0001f60a"', "\U0001f60a"),
    ],
)
def test_pythons_values(written, value):
    answer = read("pythonic", f"[f(v={written})]", tools("f", v={}))
    assert calls_of(answer) == [("f", {"v": value})]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm", "deepseek_v4", "gemma4"])
def test_escapes_in_two_parts_in_every_near_miss(family):
    before, behind = BODIES[family]
    for body in (r'f(cmd="\ud83d\ude0a")', r'{"name": "f", "arguments": {"cmd": "\ud83d\ude0a"}}'):
        answer = read(family, before + body + behind, SHELL)
        assert calls_of(answer) == [("f", {"cmd": "\U0001f60a"})]


def test_half_an_escape_is_told_as_one():
    answer = read("pythonic", r'[f(v="\ud83d!")]', tools("f", v={}))
    assert answer.tool_calls[0].arguments == r'{"v": "\ud83d!"}'
