"""Which grammars are gone through before the engine has them."""

import json
from typing import Any

import pytest

from tests.v1.structured_output.conftest import VOCAB, Reader
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers.chat_tools import parse_tools
from vllm.v1.structured_output.trial_walk import may_run_on, walk


def _tag(*formats: Any) -> str:
    return json.dumps({"format": {"type": "sequence", "elements": list(formats)}})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"grammar": "start: /a+/"}, True),
        ({"grammar": "start: /a{3,}/"}, True),
        ({"grammar": 'start: "a" | "b"'}, False),
        ({"grammar": "start: /a{3,5}/"}, False),
        ({"regex": "a+"}, False),
        ({"json": {"type": "string", "pattern": "a+"}}, False),
        ({"choice": ["a+"]}, False),
        ({"structural_tag": _tag({"type": "regex", "pattern": "a+"})}, True),
        ({"structural_tag": _tag({"type": "grammar", "grammar": "start: /a*/"})}, True),
        ({"structural_tag": _tag({"type": "const_string", "value": "a+"})}, False),
        (
            {"structural_tag": _tag({"type": "json_schema", "json_schema": {"pattern": "a+"}})},
            False,
        ),
    ],
    ids=str,
)
def test_only_what_its_author_may_have_joined_wrongly(asked: Any, expected: bool) -> None:
    assert may_run_on(StructuredOutputsParams(**asked)) is expected


@pytest.mark.parametrize("dialect", ["hermes", "kimi_k2", "gemma4", "deepseek_v4", "pythonic"])
def test_calls_are_not_gone_through(dialect: str) -> None:
    tools = parse_tools([{"function": {"name": "f", "parameters": {"type": "object"}}}])
    tag = answer_tag(dialect, AnswerGrammar(tools))
    assert not may_run_on(StructuredOutputsParams(structural_tag=tag))


@pytest.mark.parametrize("text", ['start: /[ab]+/ "c"', 'start: ("x" | "y")*', 'start: "a" start'])
def test_a_walk_leaves_the_matcher_where_it_was(reader: Reader, text: str) -> None:
    matcher = reader.backend.check(StructuredOutputsParams(grammar=text))
    before = matcher.compute_bitmask()
    walk(matcher, VOCAB)
    assert matcher.compute_bitmask() == before
