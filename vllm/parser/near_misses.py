"""Calls that a model wrote in another spelling than its format's, where their meaning is plain.

    {"name": "f", "arguments": {"cmd": "ls"}}    [{...}, {...}]    {'name': 'f', ...}
    f(cmd="ls")    call:f{cmd:"ls"}    functions.f({"cmd": "ls"})    f: {"cmd": "ls"}

Only whole texts are read, and nothing of them is passed over: where a part has no meaning, the
whole has none.
"""

import re

from vllm.parser.dialect import RawCall
from vllm.parser.json_call import call_of_object
from vllm.parser.literals import LiteralStream
from vllm.parser.offered import Offered
from vllm.parser.python_call import read_call
from vllm.tokenizers.tool_calls import split_object

_PREFIX = re.compile(r"(?:call:|functions[.:]|function:|tool:)?\s*")
_PREFIXES = ("call:", "functions.", "functions:", "function:", "tool:")
_OPENING, _CLOSING = re.compile(r"\(\s*"), re.compile(r"\s*\)")
_BRACKETS = re.compile(r"\\.|[\"'()\[\]{}]", re.DOTALL)
_WORD = re.compile(r"[^\s{}()\[\]<>\"',=:]*")
_FENCE = re.compile(r"\s*```\w*\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
_BETWEEN_NAME_AND_ARGUMENTS = re.compile(r">?(?::\d+)?\s*:?\s*(?:\[ARGS\])?\s*")
_SEPARATORS = re.compile(r"[\s,;]*")
_MAX_NAME_CHARS = 256
_MAX_SPACE_CHARS = 256


def may_begin(text: str, offered: Offered) -> bool | None:
    """Whether a text begins a near miss; None: what follows decides.

    Args:
        text: Without white space before it.
        offered: Functions that may be called.
    """
    if text[0] == "[" or text.startswith("```"):
        return True
    if any(prefix.startswith(text) for prefix in (*_PREFIXES, "```")):
        return None
    prefix = _PREFIX.match(text)
    begin = 0 if prefix is None else prefix.end()
    word = _WORD.match(text, begin, begin + _MAX_NAME_CHARS)
    name = "" if word is None else word[0]
    if begin == len(text):
        return None
    behind = text[begin + len(name) :]
    if not behind:
        return None if offered.may_begin(name) else False
    if not offered.has(name):
        return False
    if behind.isspace():
        return None if len(behind) < _MAX_SPACE_CHARS else False
    return behind.lstrip()[0] in "({[:>"


def read_calls(text: str, offered: Offered, quote: str = "") -> list[RawCall]:
    """Return the calls that a text is, all of it; none where it is something else, too.

    Args:
        text: Between the marks of a block.
        offered: Functions that may be called.
        quote: Of the format's own; empty: it has none.
    """
    fenced = _FENCE.fullmatch(text)
    text = (text if fenced is None else fenced[1]).strip()
    calls: list[RawCall] = []
    while text:
        read = _read_objects(text, offered) or _read_named(text, offered, quote)
        if read is None:
            return []
        calls += read[0]
        text = text[read[1] :]
        separators = _SEPARATORS.match(text)
        text = text[separators.end() :] if separators is not None else text
    return calls


def _read_objects(text: str, offered: Offered) -> tuple[list[RawCall], int] | None:
    """Calls as an object, or a list of such; and the length of their text."""
    if text[0] not in "{[":
        return None
    stream = LiteralStream()
    told, end = stream.add(text)
    if not stream.is_over:
        return _read_list(text, offered)
    bodies = [told]
    if text[0] == "[":
        members = split_object('{"all": ' + told + "}")
        inner = _items(told) if members is not None else None
        if not inner:
            return None
        bodies = inner
    calls = [call_of_object(body) for body in bodies]
    known = [call for call in calls if call is not None and offered.has(call.name)]
    return (known, end) if len(known) == len(calls) else None


def _items(array: str) -> list[str]:
    """The items of an array of objects, in their own spelling."""
    items: list[str] = []
    at = 1
    while True:
        separators = _SEPARATORS.match(array, at)
        at = at if separators is None else separators.end()
        if array[at : at + 1] != "{":
            return items if array[at : at + 1] == "]" else []
        stream = LiteralStream()
        told, length = stream.add(array[at:])
        items.append(told)
        at += length


def _read_list(text: str, offered: Offered) -> tuple[list[RawCall], int] | None:
    """Python's list of calls."""
    if text[0] != "[" or not text.endswith("]"):
        return None
    calls = read_calls(text[1:-1], offered) if not text[1:].lstrip().startswith("[") else []
    return (calls, len(text)) if calls else None


def _read_named(text: str, offered: Offered, quote: str) -> tuple[list[RawCall], int] | None:
    """A name and its arguments in brackets; and the length of both."""
    prefix = _PREFIX.match(text)
    begin = 0 if prefix is None else prefix.end()
    word = _WORD.match(text, begin, begin + _MAX_NAME_CHARS)
    name = "" if word is None else word[0]
    if not name or not offered.has(name):
        return None
    between = _BETWEEN_NAME_AND_ARGUMENTS.match(text, begin + len(name))
    at = begin + len(name) if between is None else between.end()
    if text[at : at + 1] not in ("{", "("):
        return None
    return _read_arguments(text, at, name, offered, quote)


def _read_arguments(
    text: str, at: int, name: str, offered: Offered, quote: str
) -> tuple[list[RawCall], int] | None:
    if text[at] == "(":
        end = _python_end(text, at)
        call = None if end is None else read_call(name + text[at:end])
        if call is not None and end is not None:
            return [call], end
        inner = _OPENING.match(text, at)
        opened = at if inner is None else inner.end()
        if text[opened : opened + 1] == "{":
            # An object in parentheses.
            closed = _read_braces(text, opened, name, offered, quote)
            behind = None if closed is None else _CLOSING.match(text, closed[1])
            return None if closed is None or behind is None else (closed[0], behind.end())
    return _read_braces(text, at, name, offered, quote)


def _read_braces(
    text: str, at: int, name: str, offered: Offered, quote: str
) -> tuple[list[RawCall], int] | None:
    stream = LiteralStream(loose=True, schema=offered.schema(name), in_parentheses=True)
    told: list[str] = []
    while at < len(text) and not stream.is_over and not stream.fault:
        mark = text.find(quote, at) if quote else -1
        stop = len(text) if mark < 0 else mark
        out, length = stream.add(text[at:stop])
        told.append(out)
        at += length
        if at == mark and not stream.is_over:
            told.append(stream.toggle_quote(quote))
            at += len(quote)
    arguments = "".join(told)
    if not stream.is_over or split_object(arguments) is None:
        return None
    return [RawCall(name, arguments)], at


def _python_end(text: str, at: int) -> int | None:
    """Where the parenthesis closes that opens at a place; None: nowhere."""
    depth, mark = 0, ""
    for match in _BRACKETS.finditer(text, at):
        char = match[0]
        if mark:
            mark = "" if char == mark else mark
        elif char in "\"'":
            mark = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if not depth:
                return match.end()
    return None
