"""Calls as JSON: Hermes, Qwen 3 and Llama 3."""

import json

import pytest

from tests.parser.reading import calls_of, pieces_of, read, told_calls
from vllm.parser.interface import ToolUse
from vllm.parser.registry import ParserChoice

QWEN = ParserChoice("qwen3", "qwen3")
LLAMA = ParserChoice("none", "llama3_json")
FIND = '{"name": "find", "arguments": {"text":  "x"}}'
NOW = '{"arguments": {}, "name": "now"}'


def tagged(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def test_calls_between_tags():
    answer = read(QWEN, "<think>\nhm\n</think>\n\nSo.\n" + tagged(FIND, NOW) + "\n")
    assert (answer.reasoning, answer.content) == ("hm", "So.")
    # Arguments keep their spelling: they come back in the next prompt.
    assert calls_of(answer) == [("find", '{"text":  "x"}'), ("now", "{}")]


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "content"),
    [
        ("\nhm\n\n</think>\n\nYes.\n", True, "hm", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("a <think> b", False, " b", "a "),
        ("\nhm\n", True, "hm", ""),
        ("hm <tool_call> hm</think>a", True, "hm <tool_call> hm", "a"),
        ("a\n\nb\n", False, "", "a\n\nb\n"),
    ],
)
def test_reasoning_and_content(text, in_reasoning, reasoning, content):
    answer = read(QWEN, text, in_reasoning=in_reasoning)
    assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "now"}', [("now", "{}")]),
        ('{"name": "now", "arguments": null}', [("now", "{}")]),
        ('{"name": "now", "parameters": {"a": 1}}', [("now", '{"a": 1}')]),
        ('{"name": "now", "arguments": "{\\"a\\": 1}"}', [("now", '{"a": 1}')]),
        ('{"name": "now", "arguments": {"a": "</tool_call>"}}', [("now", '{"a": "</tool_call>"}')]),
        ("now()", [("now", "{}")]),
        ("", []),
    ],
)
def test_bodies(body, expected):
    answer = read(QWEN, "a" + tagged(body) + "b")
    assert calls_of(answer) == expected
    assert answer.content == "ab"


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "now", "arguments": "x"}',
        '{"name": "now", "arguments": [1]}',
        '{"name": "", "arguments": {}}',
        '{"name": "later", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "now", "cmd": "ls"}',
        "not now",
    ],
)
def test_bodies_that_are_no_call_are_text(body):
    answer = read(QWEN, "a" + tagged(body) + "b")
    assert (answer.content, answer.tool_calls) == ("a" + tagged(body) + "b", [])


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"```json\n{FIND}\n```", 1, ""),
        (f"```json\n{FIND}\n```\n", 1, ""),
        (f"```\n{FIND}\n```", 1, ""),
        (f"\n```tool_call\n{FIND}", 1, ""),
        (f"```json\n{FIND}\n{FIND}\n```", 2, ""),
        (f"{FIND}\n```", 1, ""),
        (f"{FIND}\n{FIND}\n```\n", 2, ""),
        (f"```json\n[{FIND}, {FIND}]\n```", 2, ""),
        (f"```json\n{FIND}\n```\nThat finds it.", 1, "That finds it."),
        (f"```json\n{FIND}\n```\n```json\n{FIND}\n```", 2, ""),
        (FIND, 1, ""),
        (f"{FIND}\n{FIND}", 2, ""),
        (
            f"```\n{FIND}\n```\n\nSo:\n\n```json\n{FIND}\n```\nand\n```\n{FIND}\n```\n",
            3,
            "So:\nand",
        ),
        (f"{FIND}\nOne:\n```json\n[{FIND},\n {FIND}]\n```\n\nSo.", 3, "One:So."),
        (f"```json\n{FIND}\n```\nThen:\n```json\n{FIND}\n```", 2, "Then:"),
        (f"```\n{FIND}\n```\n```python\nx\n```\n```json\n{FIND}\n```", 2, "```python\nx\n```"),
    ],
)
def test_calls_without_tags(text, calls, content):
    """Qwen 2.5 Coder, whose small models have no token for the tags, writes them so."""
    answer = read(QWEN, text)
    assert calls_of(answer) == [("find", '{"text":  "x"}')] * calls
    assert answer.content == content


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"a": 1}\n```',
        "```json\n[1, 2]\n```",
        "```json\n[]\n```\nNone.",
        '```json\n{"name": "later", "arguments": {}}\n```',
        '```json\n{"name": "find", "text": 1}\n``` so',
        "```python\nfind(1)\n```",
        "```json",
        "```",
        "``` {",
        "```json\n  \n",
        "{}",
        '{"name": "Ann", "age": 3}',
        f"As in\n```json\n{FIND}\n```",
        f"```python\nx\n```\nThen:\n```json\n{FIND}\n```",
        f'```json\n{{"name": "no"}}\n```\n```\n{FIND}\n```',
        f"As in `{FIND}`",
        f"As in {FIND}",
        f"```python\n```json\n{FIND}\n```",
        f"```\nnot a call\n```\n{FIND}\n",
        "So:\n```python\nfind(1)\n```\nor\n```python\nfind(2)\n```\n",
        'So:\n```json\n{"name": "later", "arguments": {}}\n```\nthen.',
        "So: ``` and ``` and ``",
        'So:\n```json\n{"name": "Ann", "age": 3',
    ],
)
def test_what_stands_in_a_fence_or_alone_and_is_no_call_is_text(text):
    answer = read(QWEN, text)
    assert (answer.content, answer.tool_calls) == (text, [])


def test_a_fence_that_is_cut_off_loses_nothing():
    answer = read(QWEN, '```json\n{"name": "find", "argum', reason="length")
    assert (answer.content, answer.tool_calls) == ('```json\n{"name": "find", "argum', [])
    begun = '{"name": "find", "arguments": {"text": "x'
    cut = told_calls(pieces_of(QWEN, ["```json\n" + begun], "length"))
    assert cut == told_calls(pieces_of(QWEN, ["<tool_call>\n" + begun], "length"))
    assert cut == [("find", '{"text": "x', False)]
    # A request that takes no calls has the fence as its answer.
    asked = f"```json\n{FIND}\n```"
    assert read(QWEN, asked, tool_use=ToolUse.OFF).content == asked


def test_arguments_as_tags_are_typed_by_the_schema():
    body = (
        "<function=find>\n<parameter=text>\n5\n</parameter>\n<parameter=limit>\n5\n</parameter>\n"
        "<parameter=any>\n[1]\n<parameter=new>\nso\n</parameter>\n</function>"
    )
    (call,) = read(QWEN, tagged(body)).tool_calls
    expected = {"text": "5", "limit": 5, "any": [1], "new": "so"}
    assert json.loads(call.arguments) == expected


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_missing_closing_tag(reason):
    """A call is whole when its arguments are; where those come first, when the model stopped."""
    for told in (FIND, FIND[:-1]):
        answer = read(QWEN, f"a<tool_call>\n{told}", reason)
        assert (answer.content, len(answer.tool_calls)) == ("a", 1)
    assert read(QWEN, f"a<tool_call>\n{FIND[:-2]}", reason).tool_calls == []
    answer = read(QWEN, f"a<tool_call>\n{NOW}", reason)
    assert (answer.content, len(answer.tool_calls)) == ("a", int(reason == "stop"))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "find", "arguments": {"a": nope}}',
        '{"name": "find", "arguments": {"a": 1]}',
        '{"name": "\\x", "arguments": {}}',
        f'{{"name": "{"x" * 2000}", "arguments": {{"a": }}}}',
    ],
)
def test_arguments_that_are_no_json_make_no_call(body):
    answer = read(QWEN, "a" + tagged(body, FIND))
    assert calls_of(answer) == [("find", '{"text":  "x"}')]
    assert answer.content == "a" + tagged(body)


def test_without_tools_a_tag_is_text():
    text = "In Hermes, write <tool_call>{}</tool_call>."
    assert read(QWEN, text, tool_use=ToolUse.OFF).content == text
    dropped = read(QWEN, "a" + tagged(FIND), tool_use=ToolUse.DROP)
    assert (dropped.content, dropped.tool_calls) == ("a", [])


LLAMA_FIND = '{"name": "find", "parameters": {"text": "x"}}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (LLAMA_FIND, "", ["find"]),
        (f" \n{LLAMA_FIND}; {LLAMA_FIND}", "", ["find", "find"]),
        (f"<|python_tag|>{LLAMA_FIND}", "", ["find"]),
        (f"<|python_tag|>print(1)\n{LLAMA_FIND}", "<|python_tag|>print(1)\n", ["find"]),
        (f"Well: {LLAMA_FIND}", f"Well: {LLAMA_FIND}", []),
        ('{"answer": {"name": 1}}\nDone.', '{"answer": {"name": 1}}\nDone.', []),
        ('{"name": 5} and so on', '{"name": 5} and so on', []),
        (f"{LLAMA_FIND} and then", " and then", ["find"]),
        ('{"name": "find", "parameters": {"te', '{"name": "find", "parameters": {"te', []),
        ("{", "{", []),
        ("{ a set }", "{ a set }", []),
        ('{"a": 1', '{"a": 1', []),
        (
            '{"name": "find", "parameters": {"a": no}} Well.',
            '{"name": "find", "parameters": {"a": no}} Well.',
            [],
        ),
        ("  ", "  ", []),
    ],
)
def test_an_answer_that_is_a_call(text, content, names):
    answer = read(LLAMA, text)
    assert answer.content == content
    assert [call.name for call in answer.tool_calls] == names
    assert read(LLAMA, text, tool_use=ToolUse.OFF).content == text
