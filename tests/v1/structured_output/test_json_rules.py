"""Numbers end and no key comes twice, whatever a model would rather write."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.v1.structured_output.conftest import EOS, VOCAB, Reader
from vllm.parser.forced_calls import AnswerGrammar, answer_tag
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers.chat_tools import parse_tools
from vllm.v1.structured_output.grammar import Grammar
from vllm.v1.structured_output.json_rules import (
    MAX_DIGITS,
    JsonRules,
    JsonTokens,
    TaggedKeys,
    UsedKeys,
    has_free_keys,
    may_ask_for_digits,
)
from vllm.v1.structured_output.masks import MaskWork

FREE = {"type": "object", "additionalProperties": {"type": "boolean"}}
PATTERN = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "patternProperties": {"^x_[a-z]+$": {"type": "boolean"}},
}
_D = "｜DSML｜"
_DSML_HEAD = (
    f'\n\n<{_D}tool_calls>\n<{_D}invoke name="get">\n<{_D}parameter name="headers" string="false">'
)
_KIMI_HEAD = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
    '{"headers": '
)
NUMBERS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "number", "minimum": 0},
    {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
]


def start(reader: Reader, **asked: Any) -> Grammar:
    return Grammar(reader.backend.compile(StructuredOutputsParams(**asked)), frozenset([EOS]))


def allowed(reader: Reader, grammar: Grammar, drafts: Sequence[int] = ()) -> list[list[int]]:
    """What may follow, and behind each draft."""
    bits = np.full((len(drafts) + 1, -(-VOCAB // 32)), -1, dtype=np.int32)
    reader.backend.fill([MaskWork(grammar, 0, drafts)], bits)
    rows = np.unpackbits(bits.view(np.uint8), axis=1, count=VOCAB, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in rows]


def follow(reader: Reader, text: str, **asked: Any) -> set[str]:
    """What may follow a text, a byte at a time."""
    grammar = start(reader, **asked)
    for char in text:
        assert grammar.accept_tokens("q", reader.encode(char)), text
    return {reader.tokenizer.decode([token_id]) for token_id in allowed(reader, grammar)[0]}


def write(
    reader: Reader, choose: Callable[[dict[str, int]], str], limit: int = 400, **asked: Any
) -> str:
    """The answer of a model that takes of all that may follow what it likes best."""
    grammar = start(reader, **asked)
    said: list[int] = []
    while len(said) < limit:
        texts = {reader.tokenizer.decode([i]): i for i in allowed(reader, grammar)[0] if i != EOS}
        if EOS in allowed(reader, grammar)[0]:
            texts[""] = EOS
        taken = texts[choose(texts)]
        if taken == EOS:
            break
        said.append(taken)
        assert grammar.accept_tokens("q", [taken])
    return str(reader.tokenizer.decode(said))


def like_digits(texts: dict[str, int]) -> str:
    """Nines for ever."""
    wanted = ("9", ".", "}", "]", "", ",")
    return next((text for text in wanted if text in texts), min(texts, key=len))


@pytest.mark.parametrize("schema", NUMBERS, ids=str)
def test_a_number_ends(reader: Reader, schema: dict[str, Any]) -> None:
    text = write(reader, like_digits, json=schema)
    runs = re.findall(r"[0-9]+", text)
    assert runs
    # A token may hold several digits.
    assert all(MAX_DIGITS <= len(run) < MAX_DIGITS + 3 or len(run) < 4 for run in runs)
    assert not list(Draft202012Validator(schema).iter_errors(json.loads(text)))


def test_digits_of_texts_and_of_other_grammars_go_on(reader: Reader) -> None:
    digits = "9" * (MAX_DIGITS + 9)
    assert "9" in follow(reader, f'"{digits}', json={"type": "string"})
    assert "9" in follow(reader, digits, regex="[0-9]+")
    # What a schema asks for goes first.
    long = {"type": "string", "pattern": "^[0-9]{60}$"}
    assert "9" in follow(reader, f'"{digits}', json=long)
    assert "9" not in follow(reader, digits, json={"type": "integer"})
    assert "9" in follow(reader, digits[: MAX_DIGITS - 1], json={"type": "integer"})
    assert "9" in follow(reader, f"{digits[:MAX_DIGITS]}.", json={"type": "number"})
    tag = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {"type": "tag", "begin": "<a>", "content": tag, "end": "</a>"}
    asked = json.dumps({"format": tag})
    assert "9" not in follow(reader, f"<a>{digits}", structural_tag=asked)
    assert "<" in follow(reader, f"<a>{digits}", structural_tag=asked)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[0-9A-Z]{30}$"},
        {"type": "string", "pattern": r"^[0-9]{1,40}\.[0-9]{2}$"},
        {"type": "string", "enum": ["9" * 23, "9" * (MAX_DIGITS + 1) + "Z"]},
    ],
    ids=str,
)
def test_a_text_has_as_many_digits_as_it_likes(reader: Reader, schema: dict[str, Any]) -> None:
    digits = "9" * (MAX_DIGITS + 1)
    assert "9" in follow(reader, f'"{digits}', json=schema)
    # A key, and a text behind numbers.
    keys = {"type": "object", "patternProperties": {schema.get("pattern", "^[0-9A-F]+$"): schema}}
    assert "9" in follow(reader, f'{{"{digits}', json={**keys, "additionalProperties": False})
    mixed = {"type": "array", "prefixItems": [{"type": "integer"}, schema], "minItems": 2}
    assert "9" not in follow(reader, f"[{digits}", json=mixed)
    assert "9" in follow(reader, f'[{digits[:MAX_DIGITS]}, "{digits}', json=mixed)
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}}
    asked = json.dumps({"format": {**tag, "end": "</a>"}})
    assert "9" in follow(reader, f'<a>"{digits}', structural_tag=asked)


@pytest.mark.parametrize(
    ("content", "asks"),
    [
        ({"type": "regex", "pattern": "[0-9]+"}, True),
        ({"type": "grammar", "grammar": "start: /[0-9]+/"}, True),
        ({"type": "json_schema", "json_schema": {"propertyNames": {"maxLength": 3}}}, True),
        ({"type": "json_schema", "json_schema": {"properties": {"9" * 21: True}}}, True),
        # Properties of these names shape nothing.
        ({"properties": {"format": {"type": "string"}, "pattern": {"type": "string"}}}, False),
        ({"type": "json_schema", "json_schema": {"items": [{"type": "integer"}]}}, False),
    ],
    ids=str,
)
def test_tags_that_may_ask_for_more_digits_than_numbers_have(
    content: dict[str, Any], asks: bool
) -> None:
    assert may_ask_for_digits({"format": {"type": "tag", "content": content}}) is asks


class Spelt:
    """A vocabulary of these texts, as the library has it."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def is_special_token(self, token_id: int) -> bool:
        return False

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        return "".join(self.texts[i] for i in token_ids).encode()


def test_a_used_key_may_stand_as_a_value() -> None:
    texts = ('"k"', ', "k"', ' "k"', '{"k": 1')
    spelt: Any = Spelt(*texts)
    tokens = JsonTokens(spelt, {text: i for i, text in enumerate(texts)}, len(texts))

    def may_follow(*said: int) -> list[int]:
        rules = JsonRules(tokens, UsedKeys(), has_free_keys=True)
        rules.feed(said)
        bits = np.full((1, 1), (1 << len(texts)) - 1, dtype=np.int32)
        matcher: Any = None
        rules.restrict(bits, 0, matcher, [])
        return [i for i in range(len(texts)) if bits[0, 0] >> i & 1]

    # Behind a number no key comes again; behind a colon the same tokens are texts.
    assert may_follow(3) == [0, 2, 3]
    spelt.texts = (*texts[:3], '{"k": 1, "l":')
    assert may_follow(3) == [0, 2, 3]
    spelt.texts = (*texts[:3], '{"k": 1,')
    assert may_follow(3) == [3]


@pytest.mark.parametrize(
    ("text", "may_close"),
    [
        ('{"x_a": true, "x_a', False),
        ('{"x_a": true, "x_b', True),
        ('{"x_a": true, "x_ab', True),
        ('{"x_ab": true, "x_a', True),
        ('{"n": 1, "x_n', True),
        ('{"x_a": true, "x_b": true, "x_a', False),
        ('{"x_a": true,\n "x_a', False),
    ],
)
def test_no_key_of_a_pattern_comes_twice(reader: Reader, text: str, may_close: bool) -> None:
    texts = follow(reader, text, json=PATTERN)
    assert any(each.startswith('"') for each in texts) is may_close
    assert "b" in texts


@pytest.mark.parametrize(
    ("text", "may_close"),
    [
        ('{"a": {"a', True),
        ('{"a": {"b": 1}, "a', False),
        ('{"a": {"b": 1}, "b', True),
        ('{"a": [{"a": 1}, {"a', True),
        ('{"a": [{"a": 1, "a', False),
        ('{"a": "a", "b', True),
        ('{"b": "a", "a', True),
        ('{"a\\"b": 1, "a\\"b', False),
        ('{"": 1, "', False),
    ],
)
def test_each_object_has_keys_of_its_own(reader: Reader, text: str, may_close: bool) -> None:
    texts = follow(reader, text, json_object=True)
    assert any(each.startswith('"') for each in texts) is may_close


def test_a_key_is_not_begun_that_could_only_come_twice(reader: Reader) -> None:
    schema = {"type": "object", "patternProperties": {"^k[ab]$": {"type": "boolean"}}}
    asked = {"json": {**schema, "additionalProperties": False}}
    assert follow(reader, '{"ka": true, "k', **asked) == {"b"}
    # Nothing else may follow: better twice than never at an end.
    assert follow(reader, '{"ka": true, "kb": true, "k', **asked) == {"a", "b"}


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_writes_at_random_writes_no_key_twice(reader: Reader, seed: int) -> None:
    rng = random.Random(seed)

    def choose(texts: dict[str, int]) -> str:
        wanted = [text for text in ("a", "b", '"', '"', "true", ":", ",") if text in texts]
        return rng.choice(wanted or [text for text in sorted(texts) if text and "}" not in text])

    text = write(reader, choose, limit=250, json=FREE)
    keys = re.findall(r'"([^"]*)":', text)
    assert len(keys) > 12
    assert len(set(keys)) == len(keys)


def test_masks_behind_drafts_are_those_without(reader: Reader) -> None:
    text = '{"x_a": true, "x_a'
    at = text.index(", ")
    for asked, first, then in (
        ({"json": PATTERN}, text[:at], text[at:]),
        ({"json": {"type": "integer"}}, "9" * 15, "9" * MAX_DIGITS),
    ):
        grammar = start(reader, **asked)
        drafts = [token_id for char in then for token_id in reader.encode(char)]
        assert all(grammar.accept_tokens("q", reader.encode(char)) for char in first)
        rows = allowed(reader, grammar, drafts)
        for row, draft in zip(rows, [*drafts, None], strict=True):
            assert allowed(reader, grammar)[0] == row
            if draft is None or not grammar.accept_tokens("q", [draft]):
                break


@pytest.mark.parametrize(
    ("schema", "is_free"),
    [
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "array", "items": {"type": "object", "properties": {}}}, True),
        ({"type": "array", "items": {"type": "integer"}}, False),
        ({"properties": {"a": True}, "additionalProperties": False}, True),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": False}, False),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "integer"}}}, False),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, True),
        ({"anyOf": [{"type": "null"}, {"additionalProperties": {"type": "null"}}]}, True),
        (PATTERN, True),
        ({"enum": [{"a": 1}]}, False),
    ],
    ids=str,
)
def test_schemas_whose_objects_have_keys_of_the_models_choosing(
    schema: dict[str, Any], is_free: bool
) -> None:
    assert has_free_keys(schema) is is_free


_HEADERS = {
    "type": "object",
    "properties": {"headers": {"type": "object", "additionalProperties": {"type": "string"}}},
    "required": ["headers"],
}


@pytest.mark.parametrize(
    ("dialect", "before"),
    [
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"headers": '),
        ("llama3_json", '{"name": "get", "parameters": {"headers": '),
        ("qwen3_coder", "<tool_call>\n<function=get>\n<parameter=headers>\n"),
        ("deepseek_v4", _DSML_HEAD),
        ("kimi_k2", _KIMI_HEAD),
        ("mistral_v11", '[TOOL_CALLS]get[ARGS]{"headers": '),
        ("pythonic", "[get(headers="),
    ],
)
def test_no_key_comes_twice_in_an_argument(reader: Reader, dialect: str, before: str) -> None:
    tools = parse_tools([{"function": {"name": "get", "parameters": _HEADERS}}])
    asked = {"structural_tag": answer_tag(dialect, AnswerGrammar(tools))}
    for text, may_close in (('{"a": "b", "a', False), ('{"a": "b", "b', True), ('{"a', True)):
        texts = follow(reader, before + text, **asked)
        assert any(each.startswith('"') for each in texts) is may_close, text
    # What stands in a token with the beginning of the JSON is seen, too.
    grammar = start(reader, **asked)
    assert grammar.accept_tokens("q", reader.encode(before + '{"a": "b", "a'))
    texts = {reader.tokenizer.decode([i]) for i in allowed(reader, grammar)[0]}
    assert not any(each.startswith('"') for each in texts)


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ('x={"a": 1, ', [b"a"]),
        ("x=5,", []),
        ('x={"a": 1}, "b": ', []),
        ('x={"a": {"c": 1}, ', [b"a"]),
        ('x={"a": "}", ', [b"a"]),
        ('x=[{"a": 1}, {', []),
        ('x={"a": 1}x={"b": 1', [b"b"]),
        ('z={"a": 1', []),
        ('x= {"a": 1', [b"a"]),
    ],
)
def test_keys_between_tags(written: str, used: list[bytes]) -> None:
    for width in (1, 2, 3, len(written)):
        keys = TaggedKeys([b"x=", b"y="])
        raw = written.encode()
        for at in range(0, len(raw), width):
            keys.feed(raw[at : at + width])
            keys = keys.copy()
        assert sorted(keys.used) == used, (written, width)
