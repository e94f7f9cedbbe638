"""What a grammar may cost, and the checks that need no compiler."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from vllm.exceptions import UserInputError
from vllm.sampling_params import STRUCTURED_KINDS, StructuredOutputsParams

MAX_TEXT_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_CHOICES = 10_000
# A request waits this long for its grammar, others before it in the compiler's queue included.
DEADLINE_S = 30.0
_PARAM = "structured_outputs"


def check_size(params: StructuredOutputsParams) -> None:
    """Refuse what is too large or too deep to be compiled, and schemas that are no JSON objects.

    Raises:
        UserInputError: It is.

    Mutates: ``params``: a schema becomes its text, which holds numbers of any size, where messages
        between processes hold 64 bits.
    """
    if params.choice is not None and len(params.choice) > MAX_CHOICES:
        raise UserInputError(
            f"structured_outputs.choice holds {len(params.choice)} answers: at most {MAX_CHOICES} "
            "are allowed.",
            _PARAM,
        )
    # The schema's depth first: a deep one cannot be encoded.
    if params.json is not None:
        schema = read_schema(params.json)
        params.json = params.json if isinstance(params.json, str) else json.dumps(schema)
    if params.structural_tag is not None:
        read_structural_tag(params.structural_tag)
    size = len(msgspec.msgpack.encode(params))
    if size > MAX_TEXT_BYTES:
        raise UserInputError(
            f"structured_outputs: {size} bytes as a whole, at most {MAX_TEXT_BYTES} are allowed.",
            _PARAM,
        )


def read_schema(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema as an object.

    Raises:
        UserInputError: It is no JSON object, or too deep.
    """
    return _read_object(schema, "json", "a JSON schema")


def read_structural_tag(text: str) -> dict[str, Any]:
    """Return a structural tag as an object.

    Raises:
        UserInputError: It is no JSON object, or too deep.
    """
    return _read_object(text, "structural_tag", "a structural tag")


def _read_object(given: str | Mapping[str, Any], field: str, what: str) -> dict[str, Any]:
    value: Any = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise UserInputError(
                f"structured_outputs.{field} is not valid JSON: {error}.", _PARAM
            ) from error
    if not isinstance(value, dict):
        raise UserInputError(
            f"structured_outputs.{field} must be {what}, which is a JSON object, not "
            f"{type(value).__name__}.",
            _PARAM,
        )
    if _is_deeper_than(value, MAX_DEPTH):
        deep = (of for of, part in find_named_parts(value) if _is_deeper_than(part, MAX_DEPTH))
        raise make_part_error(
            next(deep, f"{_PARAM}.{field}"),
            f"is nested deeper than {MAX_DEPTH} levels: flatten it, or use $ref.",
        )
    return value


def find_named_parts(tag: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the formats of a structural tag that say what errors call them, with these names.

    Their makers put a field first in a name: "structured_outputs.tools: function 'f'".
    """
    waiting: list[Any] = [tag]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += reversed(item)
        elif isinstance(item, Mapping):
            of = item.get("of")
            if isinstance(of, str) and of.startswith(f"{_PARAM}."):
                yield of, item
            waiting += [item.get(name) for name in ("format", "content", "elements", "tags")]


def make_contradiction_error(params: StructuredOutputsParams) -> UserInputError:
    """Return the error of a grammar that leads to where no text goes on, naming what asked for it.

    Of several parts, such as functions of which one is called, what their names have in common.
    """
    of = f"{_PARAM}.{params.kind}"
    if params.structural_tag is not None:
        names = [name for name, _ in find_named_parts(read_structural_tag(params.structural_tag))]
        fields = {name.partition(":")[0] for name in names}
        if len(set(names)) == 1:
            of = names[0]
        elif len(fields) == 1:
            (of,) = fields
    return make_part_error(
        of,
        "rules itself out: the answer came to a place where no text goes on to match it. Look for "
        "a property that patternProperties, additionalProperties or allOf forbid as well.",
    )


def make_part_error(of: str, what: str) -> UserInputError:
    """Return the error of a part of a grammar, by the name that ``find_named_parts`` gives."""
    field = of.partition(":")[0]
    is_kind = field.removeprefix(f"{_PARAM}.") in STRUCTURED_KINDS
    return UserInputError(f"{of} {what}", _PARAM if is_kind else field)


def _is_deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
