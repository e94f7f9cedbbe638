"""Speculative decoding: the seam the scheduler asks; no proposer is offered by the server yet."""

from dataclasses import dataclass
from typing import Any

from vllm.exceptions import ConfigError


@dataclass
class SpeculativeConfig:
    """A drafter and how many tokens it drafts.

    Attributes:
        model: Name of the drafter; "ngram" implies that method.
        num_speculative_tokens: Draft tokens a step.
        method: "ngram", "mtp" or "eagle"; None: from ``model``.
    """

    model: str | None = None
    num_speculative_tokens: int = 1
    method: str | None = None
    target_model_config: Any = None
    target_parallel_config: Any = None

    def __post_init__(self) -> None:
        if self.method is None:
            self.method = "ngram" if self.model in ("ngram", "[ngram]") else "eagle"
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be at least 1."
            )

    def use_eagle(self) -> bool:
        """Whether the drafter's KV rows depend on the next token (EAGLE, MTP)."""
        return self.method in ("eagle", "eagle3", "mtp")
