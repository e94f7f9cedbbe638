"""However a text is cut, its pieces join to the same answer; and no call is half told."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parser.reading import D, check_order, cut_texts, pieces_of, read
from vllm.parser.interface import ToolUse
from vllm.parser.pieces import AnswerBuilder
from vllm.parser.registry import ParserChoice

_THINK = ["<think>", "</think>"]
_FRAGMENTS = {
    ParserChoice("deepseek_v4", "deepseek_v4"): [
        *_THINK,
        "\n\n",
        f"\n\n<{D}tool_calls>\n",
        f"<{D}toolcalls>",
        f'<{D}invoke name="find">\n',
        f'<{D}parameter name="text" string="true">',
        f'<{D}parameter name="limit" string="false">7',
        f'<{D}parameter name="any">{{"a": 1}}',
        f"</{D}parameter>\n",
        f"</{D}invoke>\n",
        f"</{D}tool_calls>",
    ],
    ParserChoice("qwen3", "qwen3"): [
        *_THINK,
        "\n",
        "\n<tool_call>\n",
        '{"name": "find", "arguments": {"text": "x"}}',
        '{"name": "now", "arguments": ',
        "<function=find>\n<parameter=limit>\n7\n</parameter>\n</function>",
        "\n</tool_call>",
        '"',
    ],
    ParserChoice("none", "llama3_json"): [
        "<|python_tag|>",
        '{"name": "find", "parameters": {"text": "x"}}',
        '{"name": ',
        '{"answer": 1}',
        "; ",
        '"',
        "}",
    ],
    ParserChoice("openai_gptoss", "openai"): [
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|start|>assistant",
        "<|channel|>commentary to=functions.find <|constrain|>json<|message|>",
        '{"text": "x"}',
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ],
}
CHOICES = list(_FRAGMENTS)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.tools)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_split_does_not_matter(choice, data):
    parts = data.draw(cut_texts(_FRAGMENTS[choice]))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    in_reasoning = data.draw(st.booleans())
    use = data.draw(st.sampled_from(ToolUse))
    fields = {"in_reasoning": in_reasoning, "tool_use": use}
    pieces = pieces_of(choice, parts, reason, **fields)
    builder = AnswerBuilder()
    builder.add(pieces)
    whole = read(choice, "".join(parts), reason, **fields)
    assert builder.answer == whole
    letters = pieces_of(choice, list("".join(parts)), reason, **fields)
    builder = AnswerBuilder()
    builder.add(letters)
    assert builder.answer == whole
    check_order(pieces)
    assert all(isinstance(json.loads(call.arguments), dict) for call in whole.tool_calls)
    assert use is ToolUse.PARSE or not whole.tool_calls
    if choice.tools == "deepseek_v4":
        said = whole.content + whole.reasoning
        assert f"<{D}" not in said
        assert f"</{D}" not in said
