"""The structured-output side of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.reasoning import ReasoningTracker


@dataclass
class StructuredOutputRequest:
    """What a request's output must follow, and the grammar that checks it.

    Attributes:
        params: What the user asked for.
        grammar: The compiled grammar; None until it is ready.
        reasoning_ended: Whether the part that the grammar constrains has begun; None: the answer
            begins with it.
        reasoning_parser_kwargs: A name of the interface.
        reasoning: Finds the end of the reasoning; None: the answer begins without.
    """

    params: StructuredOutputsParams
    grammar: Any = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningTracker | None = None

    @property
    def is_grammar_ready(self) -> bool:
        """Whether the request may be scheduled."""
        return self.grammar is not None

    def pass_reasoning(self, token_ids: list[int]) -> list[int]:
        """Take in tokens of an answer that reasons; return those behind the reasoning's end."""
        if self.reasoning is None:
            return []
        end = self.reasoning.find_end(token_ids)
        if end is None:
            self.reasoning.follow(token_ids)
            return []
        self.reasoning_ended = True
        return token_ids[end:]
