"""Building blocks of structural tags: formats, and what a tool's schema says of its fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.tokenizers.chat_tools import ToolSpec

Format = dict[str, Any]
# What errors call the two parts of the grammar of "a call or an answer in a form".
TOOLS_PART = "structured_outputs.tools"
ANSWER_PART = "structured_outputs.answer"
ANY_TEXT: Format = {"type": "any_text"}
# Of a schema's root: what says more than that some properties are there.
_COMBINATORS = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties"),
)
# Of a text: what only a grammar of JSON checks.
_TEXT_LIMITS = ("pattern", "format", "minLength", "maxLength", "const", "enum")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Field:
    """An argument: its name, its schema with the definitions that it may refer to.

    Attributes:
        name: Of the argument.
        schema: Of its values.
        is_required: Whether each call has it.
        of: What errors of the schema name.
    """

    name: str
    schema: Mapping[str, Any]
    is_required: bool
    of: str

    @property
    def json(self) -> Format:
        """The format of a value as JSON."""
        return json_of(self.schema, self.of)


def fields_of(tool: ToolSpec) -> list[Field] | None:
    """Return a tool's arguments in their order; None: they are more than a list of fields."""
    schema = tool.parameters
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    odd = any(set(name) & set('"<>\n') or not name for name in properties)
    says_more = any(name in schema for name in _COMBINATORS)
    if odd or says_more or not all(name in list(properties) for name in required):
        return None
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema} | _leniency(tool)
    return [
        Field(
            name,
            {**(value if isinstance(value, Mapping) else {}), **shared},
            name in required,
            f"{name_in_errors(tool)}, argument {name!r}",
        )
        for name, value in properties.items()
        # Nothing is a value of such a one.
        if value is not False or name in required
    ]


def _leniency(tool: ToolSpec) -> dict[str, Any]:
    """Return what makes a grammar pass over keywords that it cannot enforce.

    Schemas of tools come from generators (``propertyNames``, ``uniqueItems``, formats of their
    own), and nobody promised to enforce them unless ``strict`` asks for it.
    """
    own = tool.parameters.get("x-guidance")
    if own is not None or tool.function.get("strict"):
        return {} if own is None else {"x-guidance": own}
    return {"x-guidance": {"lenient": True}}


def takes_any_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema asks for a text and says nothing more of it."""
    return schema.get("type") == "string" and not any(limit in schema for limit in _TEXT_LIMITS)


def is_text_enum(schema: Mapping[str, Any], *marks: str) -> list[str]:
    """Return the texts that a schema lists, if it does and none holds a mark; else none."""
    values = schema.get("enum")
    if schema.get("type") != "string" or not isinstance(values, list):
        return []
    fits = all(
        isinstance(value, str) and not any(mark in value for mark in marks) for value in values
    )
    return list(values) if fits else []


def object_of(tool: ToolSpec) -> dict[str, Any]:
    """Return the schema of a tool's arguments as that of an object."""
    return {**tool.parameters, "type": "object", **_leniency(tool)}


def arguments_of(tool: ToolSpec) -> Format:
    """Return the format of a tool's arguments as one JSON object."""
    return json_of(object_of(tool), name_in_errors(tool))


def name_in_errors(tool: ToolSpec) -> str:
    """Return what errors of a tool's schema name."""
    return f"{TOOLS_PART}: function {tool.name!r}"


def text(value: str) -> Format:
    """Return the format of one text; special tokens are written as their text."""
    return {"type": "const_string", "value": value}


def json_of(schema: Mapping[str, Any], of: str = "") -> Format:
    """Return the format of JSON that follows a schema.

    Args:
        schema: The schema.
        of: What errors of it name, a field first; empty: the grammar as a whole.
    """
    made: Format = {"type": "json_schema", "json_schema": dict(schema)}
    return {**made, "of": of} if of else made


def any_schema_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of what follows one of some schemas, references to their roots included."""
    names = [f"option{i}" for i in range(len(schemas))]
    return {
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        "$defs": {
            name: _moved(schema, f"#/$defs/{name}")
            for name, schema in zip(names, schemas, strict=True)
        },
    }


def _moved(value: Any, root: str) -> Any:
    """A schema whose root is now elsewhere."""
    if isinstance(value, Mapping):
        return {
            key: root + inner.removeprefix("#")
            if key == "$ref" and isinstance(inner, str) and inner.startswith("#")
            else _moved(inner, root)
            for key, inner in value.items()
        }
    return [_moved(inner, root) for inner in value] if isinstance(value, list) else value


def sequence(*elements: Format) -> Format:
    """Return the format of formats one after another."""
    return {"type": "sequence", "elements": list(elements)}


def any_of(*elements: Format) -> Format:
    """Return the format of one of some formats."""
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Format, end: str) -> Format:
    """Return the format of a content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls_of(
    tags: Sequence[Format], separator: str, one_call: bool, number_behind: str = ""
) -> Format:
    """Return the format of at least one of some tags, up to the first that is there already.

    Args:
        tags: Of one call each.
        separator: Between two.
        one_call: Whether one is all.
        number_behind: What stands before a call's number, where calls are numbered.
    """
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": one_call,
        "ends_at_repeat": not one_call,
        "number_behind": number_behind,
    }


def listed(items: Sequence[tuple[Format, bool]], separator: str) -> Format:
    """Return the format of items with separators between those that are there.

    Required items come first: where one is sure, each optional one brings its separator.

    Args:
        items: Formats, and whether each is required.
        separator: Between two.
    """
    required = [item for item, is_required in items if is_required]
    optional = [item for item, is_required in items if not is_required]
    if required:
        joined = [required[0]]
        for item in required[1:]:
            joined += [text(separator), item]
        return sequence(*joined, *_more(optional, separator))
    # None is sure: whichever is there first brings no separator.
    firsts = [
        sequence(item, *_more(optional[i + 1 :], separator)) for i, item in enumerate(optional)
    ]
    return any_of(text(""), *firsts)


def listed_in_order(items: Sequence[tuple[Format, bool]], separator: str) -> Format:
    """Return the format of items in their order, whichever of the optional ones are there.

    What stands before the first required item brings the separator behind it, the rest the one
    before it.

    Args:
        items: Formats, and whether each is required.
        separator: Between two.
    """
    first = next((i for i, (_, is_required) in enumerate(items) if is_required), None)
    if first is None:
        return listed(items, separator)
    before = [any_of(text(""), sequence(item, text(separator))) for item, _ in items[:first]]
    after: list[Format] = []
    for item, is_required in items[first + 1 :]:
        after += [sequence(text(separator), item)] if is_required else _more([item], separator)
    return sequence(*before, items[first][0], *after)


def _more(optional: Sequence[Format], separator: str) -> list[Format]:
    return [any_of(text(""), sequence(text(separator), item)) for item in optional]
