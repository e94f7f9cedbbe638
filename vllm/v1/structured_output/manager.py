"""Which requests follow a grammar, and whether it advances with their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


class StructuredOutputManager:
    """The scheduler's view of grammars; compiling them is a backend's work.

    Args:
        vllm_config: All configuration. No tokenizer is loaded.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config

    def should_advance(self, request: Request) -> bool:
        """Whether the request's grammar must accept the tokens it just got.

        False without structured output, and while a reasoning part, which no grammar constrains,
        has not ended.
        """
        structured = request.structured_output_request
        if structured is None or structured.grammar is None:
            return False
        return structured.reasoning_ended is not False
