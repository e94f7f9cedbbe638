"""The functions that an answer may call."""

import re
from collections.abc import Sequence

from vllm.parser.schemas import Schema
from vllm.tokenizers.chat_tools import ToolSpec

# What every API takes for a function's name.
NAME_PATTERN = r"[a-zA-Z0-9_.-]{1,64}"
_NAME = re.compile(NAME_PATTERN)


class Offered:
    """The request's functions; without any, every name of the right form is one.

    Args:
        tools: The request's.
    """

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._schemas = {tool.name: Schema(tool.parameters) for tool in tools}
        self._longest = max(map(len, self._schemas), default=64)

    @property
    def longest(self) -> int:
        """Characters of the longest name."""
        return self._longest

    def has(self, name: str) -> bool:
        """Whether a name is a function's."""
        return name in self._schemas if self._schemas else _NAME.fullmatch(name) is not None

    def may_begin(self, text: str) -> bool:
        """Whether a text is the beginning of a function's name."""
        if not self._schemas:
            return not text or _NAME.fullmatch(text) is not None
        return any(name.startswith(text) for name in self._schemas)

    def names_at(self, text: str) -> str:
        """Return the longest name that a text begins with; empty: it begins with none."""
        if not self._schemas:
            found = _NAME.match(text)
            return "" if found is None else found[0]
        return max((name for name in self._schemas if text.startswith(name)), key=len, default="")

    def schema(self, name: str) -> Schema:
        """Return the schema of a function's arguments; of an unknown one it says nothing."""
        return self._schemas.get(name, Schema({}))

    def refusal(self, name: str) -> str:
        """Return why a name cannot be called, for people."""
        return f"no tool is named {name[:64]!r}"
