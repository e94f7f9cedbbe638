"""What went on in an answer that follows a grammar and was cut off.

An answer that is JSON is looked at as a whole. In one between tags, as calls are, the last text of
the tag before a value says where that begins:

    <tool_call>{"name": "f", "arguments": {"city": "so on and so
                                          ^ JSON that follows a schema
    <parameter=city>so on and so
                    ^ free text
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.open_json import OpenPart, find_open_part, show_place
from vllm.v1.structured_output.limits import read_structural_tag

_JSON_KINDS = ("json", "json_object")
_JSON, _TEXT = "json_schema", "any_text"
_DECODER = json.JSONDecoder()


def find_open_answer(text: str, params: StructuredOutputsParams) -> OpenPart | None:
    """Return the part of an answer that went on.

    Args:
        text: The answer behind its reasoning, its special tokens as their text.
        params: What was asked for.

    Returns:
        None: it is whole, or its grammar has no values that are known.
    """
    if params.kind in _JSON_KINDS:
        return find_open_part(text)
    if params.structural_tag is None:
        return None
    heads = list(_find_heads(read_structural_tag(params.structural_tag)))
    # Behind free text that is over, as a thought.
    first = max((_find_end(text, head) for head in heads), default=0)
    places = [(first if not head.before else text.rfind(head.before), head) for head in heads]
    found = [(at + len(head.before), head) for at, head in places if at >= first]
    if not found:
        return None
    begin, last = max(found, key=lambda item: (item[0], item[1].is_json))
    if last.is_json:
        return None if _is_over(text[begin:], last.behind) else find_open_part(text[begin:])
    where = show_place(last.before.strip())
    return OpenPart("text", where, len(text) - begin) if where else None


def must_hold_value(params: StructuredOutputsParams) -> bool:
    """Whether an answer is not whole before it has JSON, or free text between tags."""
    if params.kind in _JSON_KINDS:
        return True
    if params.structural_tag is None:
        return False
    return _must_hold_value(read_structural_tag(params.structural_tag).get("format"))


def _must_hold_value(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    if kind == "sequence":
        return any(map(_must_hold_value, _list(item, "elements")))
    if kind == "or":
        return all(map(_must_hold_value, _list(item, "elements")))
    if "tags" in item:
        return bool(item.get("at_least_one"))
    return kind == _JSON or _must_hold_value(item.get("content"))


def _is_over(text: str, behind: str) -> bool:
    """Whether JSON is whole and what comes behind it has begun."""
    value = text.lstrip()
    try:
        _, end = _DECODER.raw_decode(value)
    except (ValueError, RecursionError):
        return False
    rest = value[end:].strip()
    return bool(rest) and (rest.startswith(behind.strip()) or behind.strip().startswith(rest))


@dataclass(frozen=True, slots=True)
class _Head:
    """What stands around a value: JSON, or free text."""

    before: str
    behind: str
    is_json: bool


def _find_end(text: str, head: _Head) -> int:
    """Where the last free text behind a head has ended; 0: there is none."""
    if head.is_json or not head.behind:
        return 0
    begin = text.rfind(head.before)
    end = text.find(head.behind, begin + len(head.before)) if begin >= 0 else -1
    return end + len(head.behind) if end >= 0 else 0


def _find_heads(tag: Mapping[str, Any]) -> Iterator[_Head]:
    """Yield what stands around the values of a structural tag."""
    waiting: list[tuple[Any, str, str]] = [(tag.get("format"), "", "")]
    while waiting:
        item, before, behind = waiting.pop()
        if not isinstance(item, Mapping):
            continue
        kind = item.get("type")
        if kind in (_JSON, _TEXT):
            yield _Head(before, behind, kind == _JSON)
        own_begin, own_end = (str(item.get(name) or "") for name in ("begin", "end"))
        waiting.append((item.get("content"), own_begin, own_end))
        waiting += [(one, "", "") for one in _list(item, "tags")]
        parts = _list(item, "elements")
        if kind == "or":
            waiting += [(one, before, behind) for one in parts]
        elif kind == "sequence":
            around = [before, *map(_literal_of, parts), behind]
            waiting += [(one, around[i], around[i + 2]) for i, one in enumerate(parts)]


def _literal_of(item: Any) -> str:
    is_text = isinstance(item, Mapping) and item.get("type") == "const_string"
    return str(item.get("value")) if is_text else ""


def _list(item: Mapping[str, Any], name: str) -> list[Any]:
    found = item.get(name)
    return found if isinstance(found, list) else []
