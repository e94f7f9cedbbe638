"""What a writer writes, its parser reads back."""

import json

import pytest

from tests.parser.reading import read
from vllm.parser.registry import ParserChoice
from vllm.parser.written_calls import CALL_WRITERS
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.tool_calls import MessageCall

PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "on": {"type": "boolean"},
    "many": {"type": "array"},
    "deep": {"type": "object"},
}
TOOLS = parse_tools(
    [{"type": "function", "function": {"name": name, "parameters": {"properties": PROPERTIES}}}
     for name in ("find", "list_all")]
)  # fmt: skip
FIELDS = {"text": 'a "quoted" é', "n": 3, "on": True, "many": [1, "b", None], "deep": {"k": [2]}}


@pytest.mark.parametrize("dialect", CALL_WRITERS)
def test_a_written_call_is_read_back(dialect: str) -> None:
    calls = [
        MessageCall("1", "find", json.dumps(FIELDS)),
        MessageCall("2", "list_all", "{}"),
    ]
    for count in (1, 2):
        text = CALL_WRITERS[dialect](calls[:count])
        answer = read(ParserChoice("none", dialect), text, tools=TOOLS)
        told = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert told == [("find", FIELDS), ("list_all", {})][:count]
        assert not answer.content
