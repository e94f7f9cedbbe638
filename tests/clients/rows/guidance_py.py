"""guidance: grammars of its own, on OpenAI's chats."""

import json

import guidance
from client import MODEL, V1, Row, run
from guidance import gen, select
from guidance.models.experimental import VLLMModel


def _ask() -> VLLMModel:
    model = VLLMModel(MODEL, base_url=V1, api_key="none", echo=False)
    with guidance.user():
        model += "Which?"
    return model


def chosen(row: Row) -> None:
    model = _ask()
    with guidance.assistant():
        model += "It is " + select(["lamp", "chair"], name="kind")
    assert model["kind"] in ("lamp", "chair")
    row.shown = model["kind"]


def by_schema(row: Row) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"const": True}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    model = _ask()
    with guidance.assistant():
        model += guidance.json("reply", schema=schema)
    assert json.loads(model["reply"]) == {"ok": True}
    row.shown = model["reply"]


def by_pattern(row: Row) -> None:
    model = _ask()
    with guidance.assistant():
        model += gen("days", regex="[0-9]{2} days")
    assert len(model["days"]) == 7
    row.shown = model["days"]


run({"select": chosen, "json": by_schema, "regex": by_pattern}, "guidance")
