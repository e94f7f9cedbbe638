"""Structural tags: which texts they let through."""

import json
from typing import Any

import pytest

from tests.v1.structured_output.conftest import Reader
from vllm.exceptions import UserInputError
from vllm.sampling_params import StructuredOutputsParams

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
SPECIAL = "<｜User｜>"


def tag(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", **fields}))


def fmt(**fields: Any) -> StructuredOutputsParams:
    return tag(format=fields)


def one(begin: str, content: Any = NUMBER, end: str = "</f>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
CASES: list[tuple[str, StructuredOutputsParams, list[str], list[str]]] = [
    (
        "older form",
        tag(triggers=["<f="], structures=[{"begin": "<f=n>", "schema": {}, "end": "</f>"}]),
        ["just text", "so <f=n>[1]</f> and <f=n>2</f>!", "a < b"],
        ["so <f=x>1</f>", "so <f=n>1", "so <f=n></f>"],
    ),
    (
        "triggered, at least one, then an end",
        fmt(
            type="triggered_tags",
            triggers=["<f"],
            tags=[one("<f>"), one("<fa>", ANY)],
            at_least_one=True,
            stop_after_first=True,
        ),
        ["<f>1</f>", "<fa>any text < at all</f>"],
        ["", "text <f>1</f>", "<f>1</f><f>1</f>", "<f>x</f>", "<fa>1"],
    ),
    (
        "triggered, perhaps one",
        fmt(type="triggered_tags", triggers=["<f"], tags=[one("<f>")], stop_after_first=True),
        ["text", "text <f>1</f>"],
        ["<f>1</f> more"],
    ),
    (
        "special tokens are tokens",
        fmt(
            type="triggered_tags", triggers=[SPECIAL], tags=[one(SPECIAL + "go ", NUMBER, SPECIAL)]
        ),
        [f"text {SPECIAL}go 12{SPECIAL} text", "text"],
        [f"text {SPECIAL}no 12{SPECIAL}", f"text {SPECIAL}go 12"],
    ),
    (
        "sequence",
        fmt(
            type="sequence",
            elements=[
                {"type": "const_string", "value": "a: "},
                ANY,
                {"type": "const_string", "value": ";" + SPECIAL},
                {"type": "regex", "pattern": "[a-z]/[0-9]"},
            ],
        ),
        [f"a: what; so;{SPECIAL}x/1"],
        ["a: what", f"a: what{SPECIAL}x/1", f"a: ;{SPECIAL}x1"],
    ),
    (
        "or, grammar, GBNF",
        fmt(
            type="or",
            elements=[
                {"type": "grammar", "grammar": 'start: "lark" x\nx: "!"+'},
                {"type": "grammar", "grammar": 'root ::= "gbnf"'},
                {"type": "const_string", "value": ""},
            ],
        ),
        ["lark!!", "gbnf", ""],
        ["lark", "gbnf!"],
    ),
    (
        "separated tags",
        fmt(type="tags_with_separator", tags=[one("<a>"), one("<b>")], separator=", "),
        ["", "<a>1</f>", "<a>1</f>, <b>2</f>, <a>3</f>"],
        ["<a>1</f><b>2</f>", "<a>1</f>, "],
    ),
    (
        "a tag of free text ends at a special token",
        fmt(**one("<a>", ANY, SPECIAL)),
        [f"<a>text </f> {SPECIAL}"],
        ["<a>text", f"<a>text{SPECIAL}text"],
    ),
]


@pytest.mark.parametrize(
    ("params", "good", "bad"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_forms(
    reader: Reader, params: StructuredOutputsParams, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert reader.accepts(params, text), text
    for text in bad:
        assert not reader.accepts(params, text), text


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (StructuredOutputsParams(structural_tag="{"), "not valid JSON"),
        (StructuredOutputsParams(structural_tag="[]"), "must be a structural tag"),
        (tag(), "neither 'format' nor 'structures'"),
        (fmt(type="xml"), "'xml'"),
        (tag(format=3), "a format"),
        (fmt(type="sequence", elements=[]), "empty list"),
        (fmt(type="const_string"), "lacks 'value'"),
        (fmt(type="const_string", value=3), "wrong type"),
        (fmt(type="triggered_tags", triggers=["<x"], tags=[one("<f>")]), "begins with no trigger"),
        (
            fmt(type="triggered_tags", triggers=["a" + SPECIAL], tags=[one("a" + SPECIAL)]),
            "trigger",
        ),
        (fmt(type="triggered_tags", triggers=[], tags=[one("<f>")]), "at least one trigger"),
        (fmt(type="triggered_tags", triggers=[""], tags=[one("<f>")]), "triggers"),
        (fmt(type="json_schema", json_schema=[]), "must be an object"),
    ],
)
def test_what_is_none_is_refused(
    reader: Reader, params: StructuredOutputsParams, match: str
) -> None:
    with pytest.raises(UserInputError, match=match) as error:
        reader.backend.compile(params)
    assert error.value.param == "structured_outputs"


def test_errors_name_the_part_at_fault(reader: Reader) -> None:
    def named(schema: Any, of: str) -> Any:
        return {"type": "json_schema", "json_schema": schema, "of": of}

    def options(first: Any, second: Any) -> StructuredOutputsParams:
        tools = one("<f>", named(second, "structured_outputs.tools: function 'f'"))
        return fmt(type="or", elements=[named(first, "structured_outputs.answer"), tools])

    good, bad = {"type": "integer"}, {"type": "thing"}
    for first, second, of in (
        (bad, good, "structured_outputs.answer"),
        (good, bad, "structured_outputs.tools: function 'f'"),
    ):
        with pytest.raises(UserInputError, match=f"^{of} cannot be compiled") as error:
            reader.backend.compile(options(first, second))
        assert error.value.param == of.split(":")[0]
    # A client's own tag may say anything there.
    with pytest.raises(UserInputError, match=r"^structured_outputs.structural_tag cannot") as error:
        reader.backend.compile(fmt(**named(bad, "model")))
    assert error.value.param == "structured_outputs"
    with pytest.raises(UserInputError, match="x-guidance='5', which must be an object"):
        reader.backend.compile(fmt(**named({"x-guidance": 5}, "")))
