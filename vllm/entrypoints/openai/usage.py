"""Counting the tokens of one HTTP request."""

from collections.abc import Sequence

from vllm.entrypoints.openai.engine_stream import JobOutput
from vllm.entrypoints.openai.protocol.responses import PromptTokensDetails, Usage


class UsageCounter:
    """Tokens of all prompts (each counted once, whatever ``n``) and of all answers.

    Args:
        prompt_lens: Length of each prompt in tokens.
    """

    def __init__(self, prompt_lens: Sequence[int]) -> None:
        self._num_prompt_tokens = sum(prompt_lens)
        self._num_cached = [0] * len(prompt_lens)
        self._num_completion_tokens = 0

    def add(self, item: JobOutput) -> None:
        """Count one output; every answer token must come once (deltas, or final outputs)."""
        if item.output.num_cached_tokens is not None:
            self._num_cached[item.job_index] = item.output.num_cached_tokens
        self._num_completion_tokens += sum(len(o.token_ids) for o in item.output.outputs)

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached)),
        )
