"""Calls in the formats of families with chat templates, as their models write them."""

import json

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from tests.parser.reading import TOOLS, pieces_of, read
from tests.tokenizers.family_tokenizers import byte_level
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.parser.grammar_formats import json_of
from vllm.parser.interface import new_call_id
from vllm.parser.pieces import ToolCallStart
from vllm.parser.registry import REASONING_PARSERS, ParserChoice, choose_parsers
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.structured_output.backend import Backend

Q = '<|"|>'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    '{"text": "x", "limit": 5}<|tool_call_end|><|tool_call_begin|>functions.now:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
    '```json\n{"text": "x", "limit": 5}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"text": "x", "limit": 5}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FIND = {"text": "x", "limit": 5}
BOTH = [("find", FIND), ("now", {})]
# Reasoning parser, tool parser, what the model says, its text, its calls.
CASES = [
    (
        "qwen3",
        "qwen3_coder",
        "</think>\n\nLet me see.\n\n<tool_call>\n<function=find>\n<parameter=text>\nx\n"
        "</parameter>\n"
        "<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=now>\n</function>\n</tool_call>",
        "Let me see.\n",
        BOTH,
    ),
    # A call inside the reasoning ends it; outer tags and ends of parameters are left out.
    (
        "qwen3",
        "qwen3_coder",
        "hm<function=find>\n<parameter=text>\nx\n<parameter=limit>\n5\n</function>",
        "",
        BOTH[:1],
    ),
    (
        "glm",
        "glm",
        "hm</think>\n<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n"
        "<arg_key>limit</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>",
        "",
        BOTH,
    ),
    ("glm", "glm", "</think><tool_call>now</tool_call>", "", BOTH[1:]),
    ("kimi_k2", "kimi_k2", f"hm</think>Yes.{KIMI}", "Yes.", BOTH),
    ("deepseek_v4", "deepseek_v31", f"hm</think>Yes.{V31}", "Yes.", BOTH),
    ("deepseek_v4", "deepseek_v3", f"hm</think>Yes.{V3}", "Yes.", BOTH),
    (
        "mistral",
        "mistral",
        '[/THINK][TOOL_CALLS] [{"name": "find", "arguments": {"text": "x", "limit": 5}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        BOTH,
    ),
    (
        "mistral",
        "mistral",
        '[/THINK]Yes.[TOOL_CALLS]find[CALL_ID]a1b2c3d4e[ARGS]{"text": "x", "limit": 5}'
        "[TOOL_CALLS]now[ARGS]{}",
        "Yes.",
        BOTH,
    ),
    ("mistral", "mistral", '[/THINK][TOOL_CALLS]find{"text": "x", "limit": 5}', "", BOTH[:1]),
    (
        "gemma4",
        "gemma4",
        f"hm<channel|><|tool_call>call:find{{text:{Q}x{Q},limit:5}}<tool_call|>"
        "<|tool_call>call:now{}<tool_call|><|tool_response>made up",
        "",
        BOTH,
    ),
    (
        "gemma4",
        "gemma4",
        f'<channel|><|tool_call>call:find{{tags:[{{a b:{Q}{{,}}:"{Q}}},null,True],'
        "any:-1.5e3}<tool_call|>",
        "",
        [("find", {"tags": [{"a b": '{,}:"'}, None, True], "any": -1500.0})],
    ),
    (
        "none",
        "functiongemma",
        "<start_function_call>call:find{text:<escape>x<escape>,limit:5}<end_function_call>",
        "",
        BOTH[:1],
    ),
    ("none", "pythonic", '[find(text="x", limit=5), now()]', "", BOTH),
    (
        "none",
        "pythonic",
        "<|python_start|>[find(text='x]', tags=(1, {\"a\": None}), **{'limit': -5})]<|python_end|>",
        "",
        [("find", {"text": "x]", "tags": [1, {"a": None}], "limit": -5})],
    ),
    ("none", "pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("none", "pythonic", "[see](the page)", "[see](the page)", []),
    ("none", "pythonic", "[find(1)]", "[find(1)]", []),
    # An answer in JSON that looks a little like a call.
    ("none", "llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("none", "llama3_json", '{"name": "now"}', "", BOTH[1:]),
]


@pytest.mark.parametrize(("reasoning", "tools", "text", "content", "calls"), CASES)
def test_what_models_write(reasoning, tools, text, content, calls):
    choice = ParserChoice(reasoning, tools)
    answer = read(choice, text, in_reasoning=reasoning != "none")
    assert answer.content == content
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == calls


def test_ids_are_those_that_prompts_show_again():
    def ids(tools, text):
        pieces = pieces_of(ParserChoice("none", tools), [text], new_call_id=new_call_id)
        return [piece.id for piece in pieces if isinstance(piece, ToolCallStart)]

    assert ids("kimi_k2", KIMI) == ["functions.find:0", "functions.now:1"]
    first, second = ids("mistral", "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS]now{}")
    assert first == "a1b2c3d4e"
    assert len(second) == 9
    assert second.isalnum()


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("<tool_call><function=x><parameter=y></think>", "qwen3", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key></think>", "glm", "glm"),
        ("<|tool_calls_section_begin|>", "none", "kimi_k2"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][", "none", "mistral"),
        ("[SYSTEM_PROMPT][TOOL_CALLS]f[ARGS][THINK]", "mistral", "mistral_v11"),
        ("<|turn>model<|channel>thought<|tool_call>call:", "gemma4", "gemma4"),
        ("<start_function_call>call:", "none", "functiongemma"),
        ("[func_name1(params_name1=params_value1", "none", "pythonic"),
    ],
)
def test_templates_tell_their_format(template, reasoning, tools):
    choice = choose_parsers("anything", template)
    assert choice == ParserChoice(reasoning, tools)
    special = tools in ("kimi_k2", "gemma4", "functiongemma") or tools.startswith("mistral")
    assert choice.reads_special_tokens == special


@pytest.mark.parametrize(
    ("alias", "name"), [("glm45", "glm"), ("qwen3_xml", "qwen3_coder"), ("kimi", "kimi_k2")]
)
def test_other_names(alias, name):
    assert choose_parsers("llama", None, alias).tools == name


# ---- what grammars force is read again -----------------------------------------------------------

_SPECIAL = (
    *("<|tool_call>", "<tool_call|>", Q, "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|channel|>", "<|message|>"),
    *("<|constrain|>", "<|end|>", "<|start|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "<｜tool▁call▁end｜>",
)
FORCED = {
    "deepseek_v4": "",
    "gemma4": f"<|tool_call>call:find{{limit:5,text:{Q}x{Q}}}<tool_call|>",
    "functiongemma": "",
    "glm": "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n"
    "<arg_key>limit</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"text": "x", "limit": 5}}\n</tool_call>',
    "deepseek_v3": V3.split("\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now")[0]
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": V31.split("<｜tool▁call▁begin｜>now")[0] + "<｜tool▁calls▁end｜>",
    "kimi_k2": KIMI.split("<|tool_call_begin|>functions.now")[0] + "<|tool_calls_section_end|>",
    "llama3_json": '{"name": "find", "parameters": {"text": "x", "limit": 5}}',
    "mistral": '[TOOL_CALLS][{"name": "find", "arguments": {"text": "x", "limit": 5}}]',
    "mistral_v11": '[TOOL_CALLS]find[ARGS]{"text": "x", "limit": 5}',
    "openai": "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
    '{"text": "x", "limit": 5}',
    "pythonic": '[find(text="x", limit=5)]',
    "qwen3": "",
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=text>\nx\n</parameter>\n"
    "<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>",
}
FORM = json_of({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = byte_level()
    made.backend.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    return Tokenizer(made.backend, {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> Backend:
    end = tokenizer.token_to_id("<|im_end|>")
    return Backend(tokenizer, tokenizer.vocab_size, frozenset([end]))


def takes(backend: Backend, tokenizer: Tokenizer, tag: str, text: str) -> bool:
    """Whether a grammar takes a text as a whole answer."""
    matcher: LLMatcher = backend.check(StructuredOutputsParams(structural_tag=tag))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(("dialect", "text"), [pair for pair in FORCED.items() if pair[1]])
def test_call_or_answer(backend, tokenizer, dialect, text):
    both = answer_tag(dialect, AnswerGrammar(TOOLS, FORM))
    head = "<|channel|>final<|message|>" if dialect == "openai" else ""
    assert takes(backend, tokenizer, both, text)
    assert takes(backend, tokenizer, both, head + '{"n": 3}')
    assert not takes(backend, tokenizer, both, head + '{"n": "x"}')
    assert not takes(backend, tokenizer, both, head + "Hello.")
    forced = answer_tag(dialect, AnswerGrammar(TOOLS))
    assert takes(backend, tokenizer, forced, text)
    assert not takes(backend, tokenizer, forced, head + '{"n": 3}')
    # What the grammar forces, the parser reads.
    choice = ParserChoice("openai_gptoss" if dialect == "openai" else "none", dialect)
    answer = read(choice, text)
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == BOTH[:1]
    assert read(choice, head + '{"n": 3}').content == '{"n": 3}'


@pytest.mark.parametrize("tags", [t for t in REASONING_PARSERS.values() if t is not None])
@pytest.mark.parametrize("dialect", [name for name in FORCED if FORCED[name] and name != "openai"])
def test_a_thought_may_come_where_the_model_has_thoughts(backend, tokenizer, dialect, tags):
    thought = f"{tags.start}hm{tags.end}\n\n{FORCED[dialect]}"
    free = answer_tag(dialect, AnswerGrammar(TOOLS, thought=tags))
    assert takes(backend, tokenizer, free, thought)
    assert takes(backend, tokenizer, free, FORCED[dialect])
    none = answer_tag(dialect, AnswerGrammar(TOOLS))
    assert not takes(backend, tokenizer, none, thought)
    # Not even its beginning: a model that takes it goes on to the limit.
    matcher = backend.check(StructuredOutputsParams(structural_tag=none))
    opening = tokenizer.encode(tags.start, add_special_tokens=False)
    assert matcher.try_consume_tokens(opening) < len(opening)
    assert takes(backend, tokenizer, none, FORCED[dialect])
    either = answer_tag(dialect, AnswerGrammar(TOOLS, FORM, thought=tags))
    assert takes(backend, tokenizer, either, f'{tags.start}hm{tags.end}\n{{"n": 3}}')
