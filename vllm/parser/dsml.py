"""DeepSeek-V4's calls: blocks of DSML; ``vllm.tokenizers.deepseek_v4_tools`` shows one.

A call is told when its ``invoke`` is closed: by its own tag, by the next one, or by the block's.
Nothing behind the first block is text any more.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from vllm.parser.arguments import means_json
from vllm.parser.dialect import BlockNews, RawCall
from vllm.parser.interface import ParseOptions
from vllm.parser.marks import Marks
from vllm.tokenizers.deepseek_v4_tools import BLOCK_GAP, DSML
from vllm.tokenizers.tool_calls import split_object

# Models misspell the outer tag, and leave it out: any tag opens a block.
_TAG, _END_TAG = f"<{DSML}", f"</{DSML}"
_OUTER = ("tool_calls", "toolcalls", "tool")
_INVOKE = f"<{DSML}invoke"
_INVOKE_END = f"</{DSML}invoke>"
_PARAMETER = f"<{DSML}parameter"
_PARAMETER_END = f"</{DSML}parameter>"
_BLOCK_MARKS = Marks((_INVOKE, _INVOKE_END, *(f"</{DSML}{name}>" for name in _OUTER)))
_INVOKE_HEAD = re.compile(r'\s+name\s*=\s*"([^"]+)"\s*>')
_PARAMETER_HEAD = re.compile(r'\s+name\s*=\s*"([^"]*)"(?:\s+string\s*=\s*"(true|false)")?\s*>')
# Models wrap all arguments in one parameter of these names.
_WRAPPERS = ("arguments", "input")


class DsmlDialect:
    """See ToolDialect."""

    # The blank line before a block is a part of it.
    marks: tuple[str, ...] = (BLOCK_GAP + _TAG, _TAG, _END_TAG)
    leads: tuple[str, ...] = ()
    telltales: tuple[str, ...] = (DSML[0], BLOCK_GAP + "<")
    ends_reasoning = True
    is_special = True

    def read_block(self, opened_by: str, options: ParseOptions) -> "_DsmlReader":
        """Return the reader of what follows a mark."""
        schemas = {tool.name: tool.parameters for tool in options.tools}
        return _DsmlReader(opened_by.removeprefix(BLOCK_GAP), schemas)


class _DsmlReader:
    """Reads everything from the first block on.

    Owns: the text of the ``invoke`` that is open; None: none is.
    """

    def __init__(self, begun: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._text = begun
        self._invoke: list[str] | None = None

    def push(self, text: str) -> BlockNews:
        """Take in more of the block."""
        news = BlockNews([])
        self._text += text
        while True:
            before, mark, self._text = _BLOCK_MARKS.split(self._text)
            if self._invoke is not None and before:
                self._invoke.append(before)
            if mark is None:
                return news
            if self._invoke is not None:
                call = parse_invoke("".join(self._invoke), self._schemas)
                news.calls += [call] if call is not None else []
            self._invoke = [] if mark == _INVOKE else None

    def close(self, finish_reason: str | None) -> BlockNews:
        """Tell nothing: an ``invoke`` that is not closed may lack arguments."""
        return BlockNews([])


def parse_invoke(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> RawCall | None:
    """Return the call that stands between ``<｜DSML｜invoke`` and its end; None: it is malformed.

    Args:
        body: The text between.
        schemas: Of the tools' arguments, by name; they type what the model left open.
    """
    head = _INVOKE_HEAD.match(body)
    if head is None:
        return None
    schema = schemas.get(head[1], {})
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, str] = {}
    for part in body[head.end() :].split(_PARAMETER)[1:]:
        name = _PARAMETER_HEAD.match(part)
        if name is None:
            return None
        value, end, _ = part[name.end() :].partition(_PARAMETER_END)
        if not end:
            value = value.removesuffix("\n")
        is_text = None if name[2] is None else name[2] == "true"
        as_json = means_json(value, properties.get(name[1]), is_text)
        arguments[name[1]] = json.dumps(value, ensure_ascii=False) if as_json is None else as_json
    wrapped = _unwrapped(arguments, properties)
    return RawCall(head[1], wrapped if wrapped is not None else _object(arguments))


def _unwrapped(arguments: Mapping[str, str], properties: Mapping[str, Any]) -> str | None:
    if len(arguments) != 1:
        return None
    ((name, value),) = arguments.items()
    if name not in _WRAPPERS or name in properties:
        return None
    text = json.loads(value)
    inner = text if isinstance(text, str) else value
    return inner.strip() if split_object(inner) is not None else None


def _object(arguments: Mapping[str, str]) -> str:
    members = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items())
    return "{" + ", ".join(members) + "}"
