"""Sixty JSON schemas as programs send them: flat, nested, shared, optional, open and closed."""

import random
from itertools import count
from typing import Any

TEXT, WHOLE, NUMBER, TRUTH = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
_NAMES = ("name", "city", "count", "price", "ok", "note", "when", "tags", "kind", "id")
_COUNT = 60


def shape(required: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the schema of an object that needs all of its fields, or those named."""
    needs = list(fields) if required is None else required
    return {"type": "object", "properties": fields, "required": needs}


def list_schemas() -> list[dict[str, Any]]:
    """Return the sixty."""
    person = shape(name=TEXT, age=WHOLE)
    node = shape(["value"], value=WHOLE, next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})
    schemas: list[dict[str, Any]] = [
        person,
        shape(title=TEXT, year=WHOLE, genre={"enum": ["drama", "comedy"]}),
        shape([], a=TEXT, b=WHOLE),
        shape(items={"type": "array", "items": TEXT, "maxItems": 3}),
        shape(items={"type": "array", "items": shape(n=TEXT, q=WHOLE), "maxItems": 2}),
        shape(x={"anyOf": [TEXT, {"type": "null"}]}),
        shape(x={"anyOf": [WHOLE, {"type": "null"}]}, y=TRUTH),
        {"allOf": [shape(a=TEXT), shape(b=WHOLE)]},
        {"$defs": {"P": person}, "allOf": [{"$ref": "#/$defs/P"}, shape(role=TEXT)]},
        {"$defs": {"P": person}, **shape(who={"$ref": "#/$defs/P"}, ok=TRUTH)},
        {"$defs": {"N": node}, "$ref": "#/$defs/N"},
        shape(date={"type": "string", "format": "date"}),
        shape(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}),
        shape(short={"type": "string", "maxLength": 20}),
        shape(share={"type": "number", "minimum": 0, "maximum": 1}),
        shape(stars={"type": "integer", "minimum": 1, "maximum": 5}),
        {**shape(score=WHOLE), "patternProperties": {"^x_[a-z]+$": TRUTH}},
        {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 5},
        {"enum": ["yes", "no"]},
        {"const": {"a": 1}},
        TRUTH,
        {"type": "string", "maxLength": 50},
        shape(a=shape(b=shape(c=shape(d=TRUTH)))),
        shape(either={"anyOf": [shape(kind={"const": "a"}, v=TRUTH),
                                shape(kind={"const": "b"}, w=WHOLE)]}),
        {"anyOf": [shape(error=TEXT), shape(result=NUMBER)]},
        shape(t={"type": ["string", "null"]}),
        shape(u={"type": "string", "format": "uuid"}),
    ]  # fmt: skip
    kinds = (TEXT, WHOLE, NUMBER, TRUTH, {"anyOf": [TEXT, {"type": "null"}]})
    for seed in count():
        if len(schemas) == _COUNT:
            break
        rng = random.Random(seed)
        names = rng.sample(_NAMES, rng.randint(1, 5))
        needed = rng.sample(names, rng.randint(0, len(names)))
        drawn = shape(needed, **{name: rng.choice(kinds) for name in names})
        if drawn not in schemas:
            schemas.append(drawn)
    return schemas
