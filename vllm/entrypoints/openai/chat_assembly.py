"""Chat messages out of the finer items of other APIs."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class _Stage(IntEnum):
    """How far an assistant's turn is: it reasons, answers, then calls."""

    REASONING = 0
    CONTENT = 1
    CALLS = 2


class ChatAssembler:
    """Joins items to chat messages: an assistant's turn is one message, whatever it was sent as.

    A turn has reasoning, content and calls, in this order; what comes out of order begins another
    turn.

    Owns: ``messages``, in the chat dialect.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._stage: _Stage | None = None

    @property
    def last_index(self) -> int:
        """Where the message of the latest item stands."""
        return len(self.messages) - 1

    def add_message(self, role: str, parts: Sequence[Any], *, joins: bool = False) -> int:
        """Append a message of another role than the assistant's.

        Args:
            role: "system", "developer" or "user".
            parts: Its texts and pictures (``GivenImage``).
            joins: Whether they go into a message of the same role right before.

        Returns:
            How many parts stand before them in their message.
        """
        self._stage = None
        before: list[Any] = []
        if joins and self.messages and self.messages[-1]["role"] == role:
            before = _parts_of(self.messages.pop()["content"])
        self.messages.append({"role": role, "content": as_content([*before, *parts])})
        return len(before)

    def add_tool_result(self, call_id: str, parts: Sequence[Any]) -> None:
        """Append what a call gave: texts and pictures."""
        self._stage = None
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": as_content(parts)}
        )

    def add_reasoning(self, text: str) -> None:
        """Append an assistant's reasoning; parts of it that follow each other are paragraphs."""
        message = self._turn(_Stage.REASONING)
        before = message.get("reasoning")
        message["reasoning"] = text if before is None else f"{before}\n\n{text}"

    def add_text(self, text: str, *, continues: bool = False) -> None:
        """Append an assistant's answer.

        Args:
            text: The answer.
            continues: Whether an answer right before it goes on.
        """
        if self._stage is _Stage.CONTENT and not continues:
            self.end_turn()
        message = self._turn(_Stage.CONTENT)
        message["content"] = (message.get("content") or "") + text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Append an assistant's call.

        Args:
            call_id: Its result names it.
            name: Of the function.
            arguments: A JSON object, as text.
        """
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn(_Stage.CALLS).setdefault("tool_calls", []).append(call)

    @property
    def has_text(self) -> bool:
        """Whether the assistant's turn, so far, ends with a text."""
        return self._stage is _Stage.CONTENT and bool(self.messages[-1].get("content"))

    def end_turn(self) -> None:
        """Let what the assistant says next be another turn."""
        self._stage = None

    def _turn(self, stage: _Stage) -> dict[str, Any]:
        if self._stage is None or stage < self._stage:
            self.messages.append({"role": "assistant", "content": None})
        self._stage = stage
        return self.messages[-1]


def as_content(parts: Sequence[Any]) -> str | list[Any]:
    """Return texts and pictures as a message's content: a plain text where there is one."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _parts_of(content: str | list[Any]) -> list[Any]:
    if isinstance(content, str):
        return [content]
    return [part["text"] if isinstance(part, dict) else part for part in content]
