"""Calls as JSON objects: between tags (Hermes, Qwen 3), or as the whole answer (Llama 3)."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from vllm.parser.arguments import means_json
from vllm.parser.call_object import CallObjectReader
from vllm.parser.dialect import CallBlockDelta, CallDelta, RawCall
from vllm.parser.interface import ParseOptions
from vllm.parser.marks import JsonEnd, Marks
from vllm.tokenizers.tool_calls import split_object

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CLOSE_MARKS = Marks((_CLOSE,))
_ARGUMENTS = ("arguments", "parameters")
_PYTHON_TAG = "<|python_tag|>"
# A call's object begins with one of these keys; another first key makes it an answer in JSON.
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_HEAD_CHARS = 256
_CALL_KEYS = ("name", "type", "function", *_ARGUMENTS)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def call_of_json(text: str) -> RawCall | None:
    """Return the call that a JSON object with a name and arguments is; None: it is none."""
    members = {member.key: member for member in split_object(text) or ()}
    name = members.get("name")
    if name is None or not isinstance(name.value, str) or not name.value:
        return None
    given = members.get("id")
    call_id = given.value if given is not None and isinstance(given.value, str) else ""
    arguments = next((members[key] for key in _ARGUMENTS if key in members), None)
    if arguments is None or arguments.value is None:
        return RawCall(name.value, "{}", call_id)
    if isinstance(arguments.value, str):  # some models put the object into a string
        inner = arguments.value
        return RawCall(name.value, inner, call_id) if split_object(inner) is not None else None
    is_call = isinstance(arguments.value, dict)
    return RawCall(name.value, arguments.raw, call_id) if is_call else None


def call_of_xml(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> RawCall | None:
    """Return the call in ``<function=f><parameter=k>v</parameter></function>``; None: none is."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    properties = schemas.get(found[1], {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments = {}
    for key, spaced in _PARAMETER.findall(found[2]):
        value = spaced.removeprefix("\n").removesuffix("\n")
        as_json = means_json(value, properties.get(key))
        arguments[key] = json.dumps(value, ensure_ascii=False) if as_json is None else as_json
    members = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items())
    return RawCall(found[1], "{" + ", ".join(members) + "}")


class HermesDialect:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; see ToolDialect."""

    marks: tuple[str, ...] = ("\n" + _OPEN, _OPEN)
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = ("<tool_",)
    ends_reasoning = False
    is_special = False

    def read_block(self, opened_by: str, options: ParseOptions) -> "_HermesReader":
        """Return the reader of what follows a mark."""
        return _HermesReader({tool.name: tool.parameters for tool in options.tools})


class _HermesReader:
    """Reads one call. Owns: its text, whether that ends inside a string, what of it is told."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._text = ""
        self._body: list[str] = []
        self._is_json: bool | None = None
        self._json = JsonEnd()
        self._object = CallObjectReader()

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        self._text += text
        delta: list[CallDelta] = []
        while True:
            before, mark, self._text = _CLOSE_MARKS.split(self._text)
            delta += self._add(before)
            if mark is None:
                return CallBlockDelta(delta)
            if not self._json.in_string:
                return CallBlockDelta(delta + self._end(True), ended=True, rest=self._text)
            delta += self._add(mark)  # the tag is quoted in an argument

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """Tell the call if it is whole: only its closing tag is missing."""
        self._body.append(self._text)
        return CallBlockDelta(self._end(finish_reason == "stop"), ended=True)

    def _add(self, text: str) -> list[CallDelta]:
        self._body.append(text)
        if self._is_json is None and text.strip():
            self._is_json = text.lstrip().startswith("{")
        if not self._is_json:
            return []
        self._json.find_end(text)
        return self._object.push(text)

    def _end(self, is_whole: bool) -> list[CallDelta]:
        if self._object.has_begun:
            return self._object.close()
        body = "".join(self._body)
        call = call_of_json(body) or call_of_xml(body, self._schemas)
        return call.delta() if call is not None and is_whole else []


class LlamaDialect:
    """``{"name": ..., "parameters": {...}}`` as the whole answer; see ToolDialect."""

    marks: tuple[str, ...] = (_PYTHON_TAG,)
    leads: tuple[str, ...] = ("{",)
    telltales: tuple[str, ...] = (_PYTHON_TAG[:8],)
    ends_reasoning = False
    is_special = False

    def read_block(self, opened_by: str, options: ParseOptions) -> "_LlamaReader":
        """Return the reader of what follows a mark or lead."""
        return _LlamaReader("{" if opened_by == "{" else "", {tool.name for tool in options.tools})


class _LlamaReader:
    """Reads calls one after another, up to the end of the answer.

    Owns: the object that is being read, what of it is told, its head that shows the first key,
        and whether it may turn out to be text.
    """

    def __init__(self, begun: str, names: Collection[str]) -> None:
        self._names = names
        self._body: list[str] = []
        self._head = ""
        self._pending = begun
        self._json = JsonEnd()
        self._object = CallObjectReader()
        # Behind a python tag, or a call, nothing is text.
        self._may_be_text = bool(begun)

    def push(self, text: str) -> CallBlockDelta:
        """Take in more of the block."""
        delta = CallBlockDelta([])
        text, self._pending = self._pending + text, ""
        while text:
            if not self._body:
                # Between calls: separators are nobody's text.
                at = text.find("{")
                if at < 0:
                    return delta
                text = text[at:]
            end = self._json.find_end(text)
            self._body.append(text if end is None else text[:end])
            self._head += self._body[-1][: _HEAD_CHARS - len(self._head)]
            text = "" if end is None else text[end:]
            delta.calls += self._object.push(self._body[-1])
            self._may_be_text &= not self._object.has_begun
            if end is not None:
                told = self._end_object()
                if told is None:
                    return self._as_text(text)
                delta.calls += told
            elif self._may_be_text and self._is_answer():
                return self._as_text("")
        return delta

    def _end_object(self) -> list[CallDelta] | None:
        """Tell the rest of the object that is complete; None: it is text."""
        if self._object.has_begun:
            delta = self._object.close()
        else:
            call = call_of_json("".join(self._body))
            if self._may_be_text and (call is None or not self._is_call(call)):
                return None
            delta = call.delta() if call is not None else []
        self._may_be_text = False
        self._body, self._head = [], ""
        self._json, self._object = JsonEnd(), CallObjectReader()
        return delta

    def close(self, finish_reason: str | None) -> CallBlockDelta:
        """An object that is not closed is no whole call, and no text once it has a key."""
        body = "".join(self._body) + self._pending
        is_text = self._may_be_text and '"' not in body
        return CallBlockDelta(self._object.close(), text=body if is_text else "", ended=True)

    def _is_call(self, call: RawCall) -> bool:
        """Whether an object that may be an answer in JSON is a call: it has arguments, or a name
        that the request knows."""
        members = split_object("".join(self._body)) or ()
        return call.name in self._names or any(member.key in _ARGUMENTS for member in members)

    def _is_answer(self) -> bool:
        key = _FIRST_KEY.match(self._head)
        return key is not None and key[1] not in _CALL_KEYS

    def _as_text(self, rest: str) -> CallBlockDelta:
        return CallBlockDelta([], text="".join(self._body), ended=True, rest=rest)
