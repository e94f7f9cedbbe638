"""The structured-output side of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams


@dataclass
class StructuredOutputRequest:
    """What a request's output must follow, and the grammar that checks it.

    Attributes:
        params: What the user asked for.
        grammar: The compiled grammar; None until it is ready.
        reasoning_ended: Whether the part that the grammar constrains has begun; None: unknown.
        reasoning_parser_kwargs: How to find that out.
    """

    params: StructuredOutputsParams
    grammar: Any = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None

    @property
    def is_grammar_ready(self) -> bool:
        """Whether the request may be scheduled."""
        return self.grammar is not None
