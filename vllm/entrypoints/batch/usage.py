"""The tokens of a batch: those of its answers, whatever the API calls them."""

from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.batch.batch_store import BatchUsage


def add_usage(total: BatchUsage | None, row: Mapping[str, Any]) -> BatchUsage | None:
    """Return a usage with that of a result; None: nobody told any."""
    body = (row.get("response") or {}).get("body")
    told = body.get("usage") if isinstance(body, Mapping) else None
    if not isinstance(told, Mapping):
        return total
    total = total or BatchUsage()
    num_input = told.get("input_tokens", told.get("prompt_tokens")) or 0
    num_output = told.get("output_tokens", told.get("completion_tokens")) or 0
    total.input_tokens += num_input
    total.output_tokens += num_output
    total.total_tokens += num_input + num_output
    of_input = told.get("input_tokens_details") or told.get("prompt_tokens_details") or {}
    of_output = told.get("output_tokens_details") or told.get("completion_tokens_details") or {}
    total.input_tokens_details.cached_tokens += of_input.get("cached_tokens") or 0
    total.output_tokens_details.reasoning_tokens += of_output.get("reasoning_tokens") or 0
    return total
