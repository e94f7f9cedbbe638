"""A call in Python's spelling: ``find(text="x", limit=5)``."""

import ast
import json
import re
from typing import Any

from vllm.parser.dialect import RawCall
from vllm.parser.literals import LiteralStream
from vllm.tokenizers.tool_calls import split_object

_CONSTANTS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?=\()")
# Longer calls would take Python's parser too much memory.
_MAX_CHARS = 1 << 20


def read_call(text: str) -> RawCall | None:
    """Return the call that an expression is; None: it is none whose arguments are values."""
    plain = _read_plain(text)
    if plain is not None or len(text) > _MAX_CHARS:
        return plain
    try:
        node: Any = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            value = _value(keyword.value)
            arguments |= {keyword.arg: value} if keyword.arg is not None else value
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        name = ast.unparse(node.func)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return RawCall(name, dumped) if split_object(dumped) is not None else None


def _read_plain(text: str) -> RawCall | None:
    """A call whose values are JSON's or as plain; they keep their spelling."""
    named = _NAME.match(text)
    if named is None:
        return None
    stream = LiteralStream(in_parentheses=True)
    told, length = stream.add(text[named.end() :])
    is_all = stream.is_over and not text[named.end() + length :].strip()
    return RawCall(named[1], told) if is_all and split_object(told) is not None else None


def _value(node: ast.expr) -> Any:
    """The value of a literal; JSON's own constants count as such."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_key(key) for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    return _joined(value) if isinstance(value, str) else value


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not isinstance(key, str):
        raise ValueError("JSON's keys are texts")
    return key


def _joined(text: str) -> str:
    """A text whose letters in two parts, as JSON escapes them, are one each."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
