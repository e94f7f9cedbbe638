"""The fields that ask for structured output, in their three dialects."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from vllm.entrypoints.openai.protocol.requests import SamplingRequest
from vllm.exceptions import UserInputError
from vllm.logger import init_logger
from vllm.sampling_params import StructuredOutputsParams

logger = init_logger(__name__)

# Older names, and what they are called now.
_GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Hugging Face's clients put a schema, or an expression, beside the type.
_VALUE_KINDS = {"json_object": "json", "json": "json", "regex": "regex"}
_TEXT_FIELDS = ("regex", "grammar", "whitespace_pattern")
_SWITCHES = ("json_object", "disable_any_whitespace", "disable_additional_properties")
# How other servers' engines were told to choose a backend: there is one here.
_WITHOUT_EFFECT = ("backend", "_backend", "disable_fallback", "_backend_was_auto")
_KNOWN = ("json", "choice", "structural_tag", *_TEXT_FIELDS, *_SWITCHES, *_WITHOUT_EFFECT)


def make_structured_outputs(request: SamplingRequest) -> StructuredOutputsParams | None:
    """Return what the answer must follow; None: nothing.

    Raises:
        UserInputError: A field is malformed, or two of them ask for something.
    """
    found = {
        "response_format": _from_response_format(request.response_format),
        "structured_outputs": _from_structured_outputs(request.structured_outputs),
        "guided_*": _from_guided(request),
    }
    asked = [name for name, params in found.items() if params is not None]
    # Some clients say the same twice, for servers of different ages.
    meanings = [_read_schema(params) for params in found.values() if params is not None]
    if any(meaning != meanings[0] for meaning in meanings[1:]):
        raise UserInputError(f"{' and '.join(asked)} both ask for structure: use one.", asked[1])
    return found[asked[0]] if asked else None


def _read_schema(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return what is asked for, a schema given as text as its object."""
    if not isinstance(params.json, str):
        return params
    try:
        return replace(params, json=json.loads(params.json))
    except (ValueError, RecursionError):  # said where it is compiled
        return params


def find_structured_field(request: SamplingRequest) -> str | None:
    """Return the field that asks for structure, as ``make_structured_outputs`` takes it."""
    given = request.response_format
    if given is not None and given.get("type") != "text":
        return "response_format"
    if request.structured_outputs is not None:
        return "structured_outputs"
    return next((name for name in _GUIDED_FIELDS if getattr(request, name) is not None), None)


def asks_for_tag(request: SamplingRequest) -> bool:
    """Whether the structure asked for is a structural tag of the client's own."""
    form, outputs = request.response_format or {}, request.structured_outputs or {}
    return form.get("type") == "structural_tag" or outputs.get("structural_tag") is not None


def _from_response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    kind: Any = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if isinstance(kind, str) and kind in _VALUE_KINDS and given.get("value") is not None:
        return _make_params({_VALUE_KINDS[kind]: given["value"]})
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=json.dumps(given))
    if kind != "json_schema":
        raise UserInputError(
            f"response_format.type={str(kind)[:60]!r} is unknown: use text, json_object, "
            "json_schema or structural_tag.",
            "response_format",
        )
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, dict):
        raise UserInputError(
            "response_format.json_schema.schema is missing: give the JSON schema, an object.",
            "response_format",
        )
    return StructuredOutputsParams(json=schema)


def _from_structured_outputs(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if given is None:
        return None
    fields = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(set(fields) - set(_KNOWN))
    if unknown:
        raise _error(f"holds {', '.join(map(repr, unknown))}: use {', '.join(_KNOWN[:-4])}")
    for name in _WITHOUT_EFFECT:
        fields.pop(name, None)
    return _make_params(fields)


def _from_guided(request: SamplingRequest) -> StructuredOutputsParams | None:
    fields = {
        new: getattr(request, old)
        for old, new in _GUIDED_FIELDS.items()
        if getattr(request, old) is not None
    }
    if not fields:
        return None
    logger.warning(
        "A request uses %s: the field is now called structured_outputs.",
        ", ".join(f"guided_{name}" for name in fields),
    )
    if request.guided_whitespace_pattern is not None:
        fields["whitespace_pattern"] = request.guided_whitespace_pattern
    return _make_params(fields)


def _make_params(fields: dict[str, Any]) -> StructuredOutputsParams:
    """Check the types, which msgspec leaves to the wire."""
    for name in _TEXT_FIELDS:
        _check(fields, name, str, "a text")
    for name in _SWITCHES:
        _check(fields, name, bool, "true or false")
    _check(fields, "json", (str, dict), "a JSON schema, as an object or as its text")
    _check(fields, "structural_tag", (str, dict), "an object, or its text")
    _check(fields, "choice", list, "a list of texts")
    if not all(isinstance(choice, str) for choice in fields.get("choice", ())):
        raise _error("holds a choice that is no text")
    if isinstance(fields.get("structural_tag"), dict):
        fields["structural_tag"] = json.dumps(fields["structural_tag"])
    return StructuredOutputsParams(**fields)


def _check(fields: Mapping[str, Any], name: str, kind: Any, what: str) -> None:
    if name in fields and not isinstance(fields[name], kind):
        raise _error(f"holds {name}={str(fields[name])[:60]!r}, which must be {what}")


def _error(what: str) -> UserInputError:
    return UserInputError(f"structured_outputs {what}.", "structured_outputs")
