"""DeepSeek-V4's answers, and that they come back as the tokens they were made of."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parser.reading import TOOLS, D, calls_of, read
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.parser.interface import ToolUse
from vllm.parser.registry import ParserChoice
from vllm.tokenizers import ChatOptions, Tokenizer
from vllm.tokenizers.deepseek_v4_encoding import EOS, DeepseekV4ChatEncoder

CHOICE = ParserChoice("deepseek_v4", "deepseek_v4")


def parameter(name: str, value: str, kind: str | None = "true") -> str:
    said = "" if kind is None else f' string="{kind}"'
    return f'<{D}parameter name="{name}"{said}>{value}</{D}parameter>\n'


def invoke(*parameters: str, name: str = "find") -> str:
    return f'<{D}invoke name="{name}">\n' + "".join(parameters) + f"</{D}invoke>\n"


def block(*invokes: str, tag: str = "tool_calls") -> str:
    return f"\n\n<{D}{tag}>\n" + "".join(invokes) + f"</{D}{tag}>"


def arguments(*parameters: str) -> Any:
    (call,) = read(CHOICE, block(invoke(*parameters))).tool_calls
    return json.loads(call.arguments)


def test_parts_of_an_answer():
    answer = read(CHOICE, "hm\n</think>So:\n" + block(invoke()) + "after", in_reasoning=True)
    assert (answer.reasoning, answer.content) == ("hm\n", "So:\nafter")
    assert calls_of(answer) == [("find", "{}")]


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "content"),
    [
        ("Yes.", False, "", "Yes."),
        ("a</think>b", True, "a", "b"),
        ("<think>a</think>b", True, "a", "b"),  # opened twice
        ("<think>a</think>b", False, "a", "b"),  # opened by the model
        ("a</think>b", False, "a", "b"),  # nobody opened it
        ("a</think>b<think>c", True, "ac", "b"),
        ("a", True, "a", ""),
        ("a</thi", True, "a</thi", ""),
        ("a\n\n", False, "", "a\n\n"),
        ("a <b> \n\n<c>", False, "", "a <b> \n\n<c>"),
        ("a" + block(invoke()), True, "a", ""),  # a call ends the reasoning
    ],
)
def test_reasoning_and_content(text, in_reasoning, reasoning, content):
    answer = read(CHOICE, text, in_reasoning=in_reasoning)
    assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ([parameter("text", 'a "b"\n\\'), parameter("limit", "5", "false")],
         {"text": 'a "b"\n\\', "limit": 5}),
        ([parameter("text", "5")], {"text": "5"}),
        ([parameter("text", "5", None)], {"text": "5"}),  # the schema asks for text
        ([parameter("text", "5", "false")], {"text": "5"}),
        ([parameter("text", "[1", "false")], {"text": "[1"}),  # no JSON after all
        ([parameter("limit", "5")], {"limit": 5}),  # the schema has no room for text
        ([parameter("limit", "many")], {"limit": "many"}),
        ([parameter("limit", "[5]")], {"limit": "[5]"}),
        ([parameter("size", "2")], {"size": 2}),
        ([parameter("size", "null")], {"size": None}),
        ([parameter("tags", '["x"]')], {"tags": ["x"]}),
        ([parameter("any", '{"k": [1]}', None)], {"any": {"k": [1]}}),
        ([parameter("any", "so so", None)], {"any": "so so"}),
        ([parameter("any", "NaN", None)], {"any": "NaN"}),
        ([parameter("new", "7", "false")], {"new": 7}),
        ([parameter("any", "1", "false"), parameter("any", "2", "false")], {"any": 2}),
        ([f'<{D}parameter name="text" string="true">open\n', parameter("limit", "5", "false")],
         {"text": "open", "limit": 5}),
        ([parameter("arguments", '{"text": "x"}', "false")], {"text": "x"}),
        ([parameter("input", '{"text": "x"}')], {"text": "x"}),
        ([parameter("input", "x")], {"input": "x"}),
        ([parameter("input", "{}"), parameter("text", "x")], {"input": "{}", "text": "x"}),
    ],
)  # fmt: skip
def test_arguments(parameters, expected):
    assert arguments(*parameters) == expected


@pytest.mark.parametrize(
    "text",
    [
        block(invoke(), tag="toolcalls"),
        block(invoke(), tag="tool"),
        block(invoke(), tag="function_calls"),
        "\n\n" + invoke(),  # no outer tag
        f'\n\n<{D}tool_calls>\n<{D}invoke name="find">\n</{D}tool_calls>',
        f'\n\n<{D}tool_calls>\n<{D}invoke name="find">\n<{D}invoke name="',
    ],
)
def test_blocks_that_are_misspelled(text):
    answer = read(CHOICE, "a" + text)
    assert answer.content == "a"
    assert calls_of(answer) == [("find", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        f"\n\n<{D}tool_calls>\n",
        f"\n\n<{D}tool_calls>\n<{D}invoke>\n</{D}invoke>",
        f"\n\n<{D}",
        "\n\n<",
        f"</{D}tool_calls>",
        f"<{D}parameter",
    ],
)
def test_tags_that_say_nothing_are_no_text(text):
    answer = read(CHOICE, "a" + text)
    assert (answer.content, answer.tool_calls) == ("a", [])


@pytest.mark.parametrize(
    "text",
    [
        f'\n\n<{D}tool_calls>\n<{D}invoke name="find">\n' + parameter("text", "x"),
        block(invoke(f"<{D}parameter>x</{D}parameter>")),
        block(invoke(name="nobody")),
        block("find x"),
    ],
)
def test_what_is_no_whole_call_is_text(text):
    """But not where a limit cut it off: there is more of it than that."""
    answer = read(CHOICE, "a" + text)
    # Closing tags that stand alone say nothing.
    assert answer.tool_calls == []
    assert answer.content.startswith("a" + text.split("</")[0])
    cut = text[: text.rindex("name=")] if "name=" in text else text[: text.rindex("x")]
    answer = read(CHOICE, "a" + cut, "length")
    assert answer.tool_calls == []


@pytest.mark.parametrize("use", [ToolUse.OFF, ToolUse.DROP])
def test_calls_nobody_asked_for(use):
    answer = read(CHOICE, "a" + block(invoke()), tool_use=use)
    assert (answer.content, answer.tool_calls) == ("a", [])


def test_one_call_only():
    answer = read(CHOICE, block(invoke(), invoke(name="now")), one_call=True)
    assert calls_of(answer) == [("find", "{}")]


def test_a_lone_surrogate_cannot_be_sent():
    nested = '"{\\"a\\": \\"\\ud800\\"}"'
    assert json.loads(json.loads(nested)) == {"a": "\ud800"}
    # So the wrapper stays: in it the letter is spelled, not written.
    assert arguments(parameter("arguments", nested, "false")) == {"arguments": json.loads(nested)}


# ---- round trips ---------------------------------------------------------------------------------

# No tag of the format, and no text that schemas turn into something else.
_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="<｜"))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_NAME = st.text(alphabet="abcxyz_-0", min_size=1, max_size=8).map(lambda name: "p" + name)
_ARGUMENTS = st.dictionaries(_NAME, _TEXT | _JSON, max_size=4)


@pytest.fixture(scope="module")
def encoder() -> DeepseekV4ChatEncoder:
    return DeepseekV4ChatEncoder(Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path))


@settings(max_examples=80, deadline=None)
@given(
    reasoning=_TEXT,
    content=_TEXT,
    calls=st.lists(st.tuples(st.sampled_from(["find", "now"]), _ARGUMENTS), max_size=3),
    thinking=st.booleans(),
)
def test_what_was_rendered_is_read_and_rendered_again(encoder, reasoning, content, calls, thinking):
    """parse(render(x)) == x, and render(parse(text)) == text: the cache meets its own tokens."""
    sent = [
        {"id": f"call_{i}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=i % 2 == 0)}}
        for i, (name, given) in enumerate(calls)
    ]  # fmt: skip
    message = {"role": "assistant", "content": content, "tool_calls": sent}
    message |= {"reasoning": reasoning} if thinking else {}
    start = [{"role": "user", "content": "Hi"}]
    options = ChatOptions(tools=TOOLS, template_kwargs={"thinking": thinking})
    prompt = encoder.encode_chat(start, options)

    def answer_text(turn: dict[str, Any]) -> str:
        closed = ChatOptions(
            tools=TOOLS, template_kwargs={"thinking": thinking}, add_generation_prompt=False
        )
        whole = encoder.encode_chat([*start, turn], closed).text
        assert whole.startswith(prompt.text)
        assert whole.endswith(EOS)
        return whole[len(prompt.text) : -len(EOS)]

    said = answer_text(message)
    answer = read(CHOICE, said, in_reasoning=prompt.in_reasoning)
    assert answer.reasoning == (reasoning if thinking else "")
    assert answer.content == content
    assert [(c.id, c.name) for c in answer.tool_calls] == [
        (c["id"], c["function"]["name"]) for c in sent
    ]
    assert [json.loads(c.arguments) for c in answer.tool_calls] == [given for _, given in calls]
    again = message | {
        "reasoning": answer.reasoning,
        "content": answer.content,
        "tool_calls": [
            {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in answer.tool_calls
        ],
    }
    assert answer_text(again) == said
