"""The three APIs: what is sent, and what their streams say."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.benchmarks.client.observation import Usage
from vllm.benchmarks.client.sse import Event
from vllm.benchmarks.datasets.prompt import BenchRequest


@dataclass(slots=True)
class StreamState:
    """What a stream has said so far.

    Attributes:
        usage: Tokens, as far as reported.
        texts: Pieces of the answer.
        has_tokens: Whether the last event carried tokens.
        num_chunks: Events that carried tokens.
        is_done: Whether the stream said it is over.
        error: What it said went wrong.
        request_id: The response's id.
    """

    usage: Usage = field(default_factory=Usage)
    texts: list[str] = field(default_factory=list)
    has_tokens: bool = False
    num_chunks: int = 0
    is_done: bool = False
    error: str = ""
    request_id: str = ""


class Dialect(ABC):
    """One API.

    Attributes:
        default_path: Its route.
    """

    default_path: str

    @abstractmethod
    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """Return what to send, sampling parameters aside."""

    @abstractmethod
    def read(self, message: Mapping[str, Any], state: StreamState) -> None:
        """Take one event's object."""

    def take(self, event: Event, state: StreamState) -> None:
        """Take one event of the stream."""
        state.has_tokens = False
        if event.data == "[DONE]":
            state.is_done = True
            return
        try:
            message = json.loads(event.data)
        except ValueError:
            state.error = f"an event that is no JSON: {event.data[:200]}"
            return
        if not isinstance(message, dict):
            state.error = f"an event that is no object: {event.data[:200]}"
            return
        error = message.get("error")
        if error:
            state.error = error_text(error)
            return
        self.read(message, state)


def error_text(error: Any) -> str:
    """Return the message of an error in any of the usual forms."""
    if isinstance(error, Mapping):
        return str(error.get("message") or dict(error))
    return str(error)


def read_usage(raw: Any, usage: Usage) -> None:
    """Take what a server says of tokens, under the names of either API; the rest stays unknown."""
    if not isinstance(raw, Mapping):
        return
    for mine, names in (
        ("prompt_tokens", ("prompt_tokens", "input_tokens")),
        ("completion_tokens", ("completion_tokens", "output_tokens")),
    ):
        for name in names:
            if type(raw.get(name)) is int:
                setattr(usage, mine, raw[name])
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = raw.get(name)
        if not isinstance(details, Mapping):
            continue
        if type(details.get("cached_tokens")) is int:
            usage.cached_tokens = details["cached_tokens"]
        if isinstance(details.get("miss_tokens"), Mapping):
            usage.miss_tokens = {str(k): int(v) for k, v in details["miss_tokens"].items()}


class Completions(Dialect):
    """``/v1/completions``: every chunk with choices carries tokens, if only part of a character."""

    default_path = "/v1/completions"

    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """Return what to send."""
        return {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, message: Mapping[str, Any], state: StreamState) -> None:
        """Take a chunk."""
        state.request_id = message.get("id") or state.request_id
        read_usage(message.get("usage"), state.usage)
        for choice in message.get("choices") or ():
            state.has_tokens = True
            state.texts.append(choice.get("text") or "")
            state.is_done |= choice.get("finish_reason") is not None


class ChatCompletions(Dialect):
    """``/v1/chat/completions``: the chunk that only names the role is no token."""

    default_path = "/v1/chat/completions"
    _CONTENT = ("content", "reasoning", "reasoning_content")

    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """Return what to send."""
        messages: Any = request.messages or ({"role": "user", "content": request.prompt},)
        return {
            "model": model,
            "messages": list(messages),
            "max_completion_tokens": request.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, message: Mapping[str, Any], state: StreamState) -> None:
        """Take a chunk."""
        state.request_id = message.get("id") or state.request_id
        read_usage(message.get("usage"), state.usage)
        for choice in message.get("choices") or ():
            delta = choice.get("delta") or {}
            pieces = [delta[name] for name in self._CONTENT if delta.get(name)]
            state.texts += pieces
            names_role = "role" in delta and not pieces and not delta.get("tool_calls")
            is_end = choice.get("finish_reason") is not None
            state.is_done |= is_end
            # An end that brings nothing new, after tokens, is no token of its own.
            is_new = pieces or delta.get("tool_calls") or not state.num_chunks
            is_bare_end = is_end and not is_new
            state.has_tokens |= not names_role and not is_bare_end


class Responses(Dialect):
    """``/v1/responses``: named events; deltas of text, reasoning or arguments carry tokens."""

    default_path = "/v1/responses"
    _ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")

    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """Return what to send; nothing is stored for a later turn."""
        return {
            "model": model,
            "input": list(request.messages) if request.messages else request.prompt,
            "max_output_tokens": request.num_output_tokens,
            "stream": True,
            "store": False,
        }

    def read(self, message: Mapping[str, Any], state: StreamState) -> None:
        """Take an event."""
        kind = str(message.get("type", ""))
        if kind == "error":
            state.error = error_text(message)
        elif kind.endswith(".delta"):
            state.has_tokens = True
            if kind == "response.output_text.delta":
                state.texts.append(str(message.get("delta", "")))
        response = message.get("response")
        if not isinstance(response, Mapping):
            return
        state.request_id = response.get("id") or state.request_id
        if kind in self._ENDS:
            state.is_done = True
            read_usage(response.get("usage"), state.usage)
            if kind == "response.failed":
                state.error = error_text(response.get("error") or "the response failed")


DIALECTS: dict[str, Dialect] = {
    "openai": Completions(),
    "vllm": Completions(),
    "openai-chat": ChatCompletions(),
    "openai-responses": Responses(),
}
