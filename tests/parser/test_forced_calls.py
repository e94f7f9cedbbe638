"""What a forced call's grammar takes: calls that follow their schemas, and nothing else."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.parser.reading import D, read
from tests.tokenizers.family_tokenizers import byte_level
from vllm.exceptions import UserInputError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.registry import REASONING_PARSERS, ParserChoice
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.chat_tools import ToolSpec, parse_tools
from vllm.v1.structured_output.backend import Backend

SCHEMA = {
    "type": "object",
    "required": ["n", "kind"],
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer", "minimum": 0},
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "code": {"type": "string", "pattern": "^[0-9]+$"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
    },
    "$defs": {"item": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
}
TOOLS = parse_tools(
    [
        {"function": {"name": "find", "parameters": SCHEMA}},
        {"function": {"name": "now"}},
        {"function": {"name": "odd", "parameters": {"anyOf": [{"required": ["a"]}]}}},
    ]
)
FIND = (
    f'<{D}parameter name="n" string="false">7</{D}parameter>\n'
    f'<{D}parameter name="kind" string="true">b c</{D}parameter>\n'
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> Backend:
    return Backend(tokenizer, tokenizer.vocab_size, frozenset([1]))


def matcher(backend: Backend, dialect: str, tools: Any, one_call: bool) -> LLMatcher:
    tag = answer_tag(dialect, AnswerGrammar(tools, one_call=one_call, is_behind_thought=True))
    return backend.check(StructuredOutputsParams(structural_tag=tag))


def takes(made: LLMatcher, token_ids: list[int]) -> bool:
    return made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting()


def invoke(name: str, body: str = "") -> str:
    return f'<{D}invoke name="{name}">\n{body}</{D}invoke>\n'


def block(*invokes: str) -> str:
    return f"\n\n<{D}tool_calls>\n" + "".join(invokes) + f"</{D}tool_calls>"


ODD = f'<{D}parameter name="arguments" string="false">{{"a": 1}}</{D}parameter>\n'
CODE = f'<{D}parameter name="code" string="false">"12"</{D}parameter>\n'


@pytest.mark.parametrize(
    ("text", "one_call", "taken"),
    [
        (block(invoke("find", FIND)), False, True),
        (block(invoke("find", FIND), invoke("now")), False, True),
        (block(invoke("find", FIND), invoke("now")), True, False),
        (block(invoke("find", FIND + CODE)), False, True),
        (block(invoke("find", FIND + CODE.replace("12", "x"))), False, False),
        (block(invoke("find", FIND.replace("7", "-7"))), False, False),
        (block(invoke("find", FIND.replace("b c", "c"))), False, False),
        (block(invoke("find")), False, False),
        (block(invoke("odd", ODD)), False, True),
        (block(invoke("other")), False, False),
        (block(), False, False),
        ("Well." + block(invoke("now")), False, False),
        (block(invoke("now")) + "Well.", False, False),
    ],
)
def test_deepseek(tokenizer, backend, text, one_call, taken):
    made = matcher(backend, "deepseek_v4", TOOLS, one_call)
    assert takes(made, tokenizer.encode(text, False)) is taken
    if taken:
        for call in read(ParserChoice("none", "deepseek_v4"), text, tools=TOOLS).tool_calls:
            (tool,) = (tool for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), tool.parameters)


# What generators of schemas write, and grammars cannot enforce.
GENERATED = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "at": {"type": "string", "format": "duration-in-s"},
        "never": False,
    },
    "required": ["tags", "at"],
    "propertyNames": {"pattern": "^[a-z]+$"},
}


@pytest.mark.parametrize("dialect", ["deepseek_v4", "hermes", "qwen3_coder", "mistral"])
@pytest.mark.parametrize("without", ["", "propertyNames"])
def test_keywords_that_no_grammar_enforces_are_passed_over(backend, dialect, without):
    schema = {name: value for name, value in GENERATED.items() if name != without}
    assert not matcher(backend, dialect, make_tools(schema), True).is_error()
    with pytest.raises(UserInputError, match="Unimplemented keys"):
        matcher(backend, dialect, make_tools(schema, strict=True), True)


def make_tools(schema: dict[str, Any], **options: bool) -> tuple[ToolSpec, ...]:
    return parse_tools([{"function": {"name": "f", "parameters": schema, **options}}])


def test_a_field_that_no_value_fits_is_not_offered(tokenizer, backend):
    schema = {"type": "object", "properties": {"a": {"const": 1}, "never": False}}
    made = matcher(backend, "deepseek_v4", make_tools(schema), True)
    for name, is_taken in (("a", True), ("never", False)):
        body = f'<{D}parameter name="{name}" string="false">1</{D}parameter>\n'
        assert (
            takes(made.deep_copy(), tokenizer.encode(block(invoke("f", body)), False)) is is_taken
        )


ARGUMENTS = '{"text": "x", "n": 7, "kind": "a"}'
HERMES = f'<tool_call>\n{{"name": "find", "arguments": {ARGUMENTS}}}\n</tool_call>'
LLAMA = f'{{"name": "find", "parameters": {ARGUMENTS}}}'


@pytest.mark.parametrize(
    ("dialect", "text", "taken"),
    [
        ("hermes", HERMES, True),
        ("qwen3", "\n\n" + HERMES + "\n" + HERMES, True),
        ("hermes", HERMES.replace("7", '"7"'), False),
        ("hermes", "So: " + HERMES, False),
        ("llama3_json", LLAMA, True),
        ("llama3_json", LLAMA + "; " + LLAMA, True),
        ("llama3_json", LLAMA.replace("find", "found"), False),
        ("llama3_json", "So: " + LLAMA, False),
    ],
)
def test_calls_as_json(tokenizer, backend, dialect, text, taken):
    made = matcher(backend, dialect, TOOLS, one_call=False)
    assert takes(made, tokenizer.encode(text, False)) is taken
    if taken:
        answer = read(ParserChoice("none", dialect), text, tools=TOOLS)
        assert [call.arguments for call in answer.tool_calls] == [ARGUMENTS] * text.count("find")


HARMONY_CALL = (
    "<|channel|>commentary to=functions.find <|constrain|>json<|message|>" + ARGUMENTS + "<|call|>"
)
HARMONY_THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("dialect", "text", "taken"),
    [
        ("openai", HARMONY_CALL, True),
        ("openai", HARMONY_THOUGHT + HARMONY_CALL, True),
        ("openai", HARMONY_CALL.replace("find", "found"), False),
        ("openai", "<|channel|>final<|message|>Yes.<|call|>", False),
        ("qwen3", HERMES + "<|im_end|>", True),
        ("qwen3", "<think>\nhm\n</think>\n\n" + HERMES + "<|im_end|>", True),
        ("qwen3", "<think>\nhm\n</think>\n\nYes.<|im_end|>", False),
    ],
)
def test_marks_that_are_tokens(dialect, text, taken):
    """Special tokens, and those that only the grammar library takes for special."""
    tokenizer = byte_level()
    harmony = ("channel", "message", "constrain", "start", "end", "call")
    tokenizer.backend.add_special_tokens([f"<|{name}|>" for name in harmony])
    tokenizer.backend.add_tokens(["<tool_call>", "</tool_call>", "</think>"])
    ends = [tokenizer.token_to_id(end) for end in ("<|call|>", "<|im_end|>")]
    backend = Backend(tokenizer, tokenizer.vocab_size, frozenset(ends))
    tags = REASONING_PARSERS.get(dialect)
    tag = answer_tag(dialect, AnswerGrammar(TOOLS[:1], thought=tags))
    made = backend.check(StructuredOutputsParams(structural_tag=tag))
    *token_ids, end = tokenizer.encode(text, False)
    assert end in ends
    assert takes(made, token_ids) is taken


_NAMES = st.text(alphabet='ab"<é ', min_size=0, max_size=3)
_TYPES = st.sampled_from(
    [
        {},
        True,
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": ["integer", "null"]},
        {"enum": ["a", 1]},
        {"type": "object", "properties": {"k": {"type": "number"}}},
    ]
)


@settings(max_examples=30, deadline=None)
@given(
    properties=st.dictionaries(_NAMES, _TYPES, max_size=4),
    required=st.lists(_NAMES, max_size=2),
    dialect=st.sampled_from(["deepseek_v4", "hermes", "llama3_json"]),
)
def test_any_schema_makes_a_grammar(backend, properties, required, dialect):
    schema = {"type": "object", "properties": properties, "required": required}
    found = matcher(backend, dialect, [ToolSpec("f", {"name": "f"}, schema)], one_call=False)
    assert not found.is_error()


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1]},
        {"properties": {"a": 5}, "required": "a"},
        {"required": [{}]},
        {"type": "array"},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
    ],
)
def test_a_schema_that_is_none_is_refused_as_a_grammar_and_not_before(parameters):
    tools = [ToolSpec("f", {"name": "f"}, parameters)]
    for dialect in ("deepseek_v4", "hermes", "qwen3", "llama3_json", "openai"):
        assert json.loads(answer_tag(dialect, AnswerGrammar(tools)))
