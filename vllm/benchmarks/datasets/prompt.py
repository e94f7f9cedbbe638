"""One request to send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What one request asks.

    Attributes:
        prompt: As text.
        num_prompt_tokens: By the client's tokenizer; what the server says wins.
        num_output_tokens: Asked for.
        turn: Number of the conversation's turn, or of the round; None: there are none.
        arrival_s: When a trace says it came; None: as the request rate says.
        messages: A whole chat instead of one user's message, for chat backends.
        extra_body: Further fields of this request's body.
    """

    prompt: str
    num_prompt_tokens: int
    num_output_tokens: int
    turn: int | None = None
    arrival_s: float | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
