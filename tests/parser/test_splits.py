"""However a text is cut, its pieces join to the same answer, calls that break off included."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parser.reading import D, cut_texts, options, pieces_of, read, told_calls
from vllm.parser.interface import ToolUse
from vllm.parser.pieces import AnswerBuilder, ToolCallArguments, ToolCallStart
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
        "```json\n",
        "\n```\n",
        "```",
        "so",
        "[",
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
    ParserChoice("qwen3", "qwen3_coder"): [
        *_THINK,
        "\n",
        "<tool_call>",
        "<function=find>",
        "<parameter=text>",
        "<parameter=limit>\n7\n",
        "<parameter=arguments>",
        '{"text": "x"}',
        "</parameter>",
        "</function>",
        "</tool_call>",
    ],
    ParserChoice("glm", "glm"): [
        *_THINK,
        "\n",
        "<tool_call>find\n",
        "<arg_key>text</arg_key>",
        "<arg_key>limit</arg_key>\n",
        "<arg_value>",
        "7",
        "</arg_value>",
        "</tool_call>",
    ],
    ParserChoice("kimi_k2", "kimi_k2"): [
        *_THINK,
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.find:0",
        "<|tool_call_argument_begin|>",
        '{"text": "x"}',
        '{"text": ',
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        " ",
    ],
    ParserChoice("mistral", "mistral"): [
        "[THINK]",
        "[/THINK]",
        "[TOOL_CALLS]",
        '[{"name": "find", "arguments": {"text": "x"}}',
        '{"name": "now"}',
        ", ",
        "]",
        "find",
        "[CALL_ID]a1b2c3d4e",
        "[ARGS]",
        '{"text": "x"}',
    ],
    ParserChoice("gemma4", "gemma4"): [
        "<|channel>thought\n",
        "<channel|>",
        "<|tool_call>call:find",
        "{text:",
        '<|"|>',
        "x",
        "limit:7",
        ",",
        "tags:[1,{a:true}]",
        "}",
        "<tool_call|>",
        "<|tool_response>",
    ],
    ParserChoice("none", "pythonic"): [
        "[",
        "find(",
        "text=",
        "'x]'",
        '"y"',
        "limit=5",
        "tags=[1, {'a': None}]",
        "now()",
        ", ",
        ")",
        "]",
        "<|python_start|>",
    ],
}
CHOICES = list(_FRAGMENTS)
# Python's spelling is known to be a call when its last bracket closes.
STREAMED = [choice for choice in CHOICES if choice.tools != "pythonic"]


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
    calls = told_calls(pieces)
    assert told_calls(letters) == calls
    whole_calls = [(call.name, call.arguments) for call in whole.tool_calls]
    assert [call[:2] for call in calls if call[2]] == whole_calls
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole_calls)
    assert use is ToolUse.PARSE or not calls
    if choice.tools == "deepseek_v4":
        # What is not whole cannot be taken for a call: its object is opened and not closed.
        cut = [arguments for _, arguments, is_whole in calls if not is_whole]
        assert all(arguments.startswith("{") and not _is_json(arguments) for arguments in cut)


def _is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# ---- arguments come while the model writes them --------------------------------------------------

_LONG = "letter by letter, " * 5 + 'with "quotes"\n'
_CALLS = {
    "deepseek_v4": f'\n\n<{D}tool_calls>\n<{D}invoke name="find">\n<{D}parameter name="text" '
    f'string="true">{_LONG}</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>',
    "qwen3": f'<tool_call>\n{{"name": "find", "arguments": {json.dumps({"text": _LONG})}}}\n'
    "</tool_call>",
    "llama3_json": f'{{"name": "find", "parameters": {json.dumps({"text": _LONG})}}}',
    "qwen3_coder": f"<tool_call>\n<function=find>\n<parameter=text>\n{_LONG}\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": f"<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>{_LONG}</arg_value>\n"
    "</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0"
    f"<|tool_call_argument_begin|>{json.dumps({'text': _LONG})}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "mistral": f"[TOOL_CALLS]find[ARGS]{json.dumps({'text': _LONG})}",
    "gemma4": f'<|tool_call>call:find{{text:<|"|>{_LONG}<|"|>}}<tool_call|>',
    "openai": "<|channel|>commentary to=functions.find<|message|>"
    f"{json.dumps({'text': _LONG})}<|call|>",
}


@pytest.mark.parametrize("choice", STREAMED, ids=lambda choice: choice.tools)
def test_arguments_trickle_in(choice):
    text = _CALLS[choice.tools]
    parser = choice.make_parser(options())
    told = [parser.feed(letter, []) for letter in text]
    assert isinstance(next(pieces for pieces in told if pieces)[0], ToolCallStart)
    # No letter waits for the next but one.
    begin = text.index("letter")
    for i in range(begin + 2, begin + 60):
        so_far = "".join(p.text for ps in told[: i + 1] for p in ps if _is_arguments(p))
        assert text[begin:i] in so_far
    (call,) = told_calls([p for pieces in told for p in pieces])
    assert (call[0], json.loads(call[1]), call[2]) == ("find", {"text": _LONG}, True)


def _is_arguments(piece):
    return isinstance(piece, ToolCallArguments)


@pytest.mark.parametrize("choice", STREAMED, ids=lambda choice: choice.tools)
def test_a_call_that_breaks_off_is_no_call(choice):
    """Cut anywhere inside its arguments: told as far as it came, not whole, and no JSON."""
    text = _CALLS[choice.tools]
    for cut in range(text.index("letter"), text.index("quotes"), 7):
        pieces = pieces_of(choice, list(text[:cut]), "length")
        (call,) = told_calls(pieces)
        assert (call[0], call[2]) == ("find", False)
        assert not _is_json(call[1])
        answer = read(choice, text[:cut], "length")
        assert (answer.content, answer.tool_calls) == ("", [])
