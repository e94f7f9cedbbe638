"""Perplexity of a trained model over English prose, by how products and the cache are rounded.

The text is the reference of the Python language, which every interpreter carries
(``pydoc_data.topics``). It is read in windows, each with the model's own first token, and every
token after a window's first is scored.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

from benchmarks.real_weights.checks import Report, open_engine
from benchmarks.real_weights.side_by_side import run_side_by_side
from vllm import LLM, SamplingParams
from vllm.tokenizers import Tokenizer

WINDOW = 1024
# By how much of it a rounding may raise the perplexity before something is broken.
_MOST = 0.01
_WIDE: Mapping[str, Any] = {"quantized_inputs": "exact", "kv_cache_dtype": "float32"}
# What an engine is told, by the name of the way of rounding.
ROUNDINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "exact": _WIDE,
        "int16_inputs": {**_WIDE, "quantized_inputs": "int16"},
        "int8_inputs": {**_WIDE, "quantized_inputs": "int8"},
        "float16_cache": {**_WIDE, "kv_cache_dtype": "float16"},
        "bfloat16_cache": {**_WIDE, "kv_cache_dtype": "bfloat16"},
        "int8_cache": {**_WIDE, "kv_cache_dtype": "int8"},
    }
)


def check_perplexity(
    path: Path, num_tokens: int, roundings: Sequence[str] = tuple(ROUNDINGS)
) -> Report:
    """Measure ways of rounding.

    Args:
        path: The model's file.
        num_tokens: So many are scored, or the windows that hold as many.
        roundings: Of ``ROUNDINGS``; others are compared with the exact one where it is among them.
    """
    windows = cut_windows(Tokenizer.from_folder(path), num_tokens)
    found = run_side_by_side(
        {name: partial(_measure, path, windows, ROUNDINGS[name]) for name in roundings}
    )
    report = Report({**found, "tokens": sum(len(window) - 1 for window in windows)})
    exact = found.get("exact", math.inf)
    for name, perplexity in found.items():
        excess = perplexity / exact - 1
        if excess > _MOST:
            report.faults.append(f"{name}: {excess:.2%} above the exact {exact}")
    return report


def _measure(path: Path, windows: Sequence[list[int]], options: Mapping[str, Any]) -> float:
    with open_engine(path, **options) as llm:
        loss, count = score(llm, windows)
    return math.exp(loss / count)


def read_text() -> str:
    """Return the text."""
    return "\n".join(topics[name] for name in sorted(topics))


def cut_windows(tokenizer: Tokenizer, num_tokens: int) -> list[list[int]]:
    """Return windows of the text's tokens, so many that as many are scored."""
    first = tokenizer.encode("")
    ids = tokenizer.encode(read_text())[len(first) :]
    size = WINDOW - len(first)
    whole = [first + ids[at : at + size] for at in range(0, len(ids) - size, size)]
    return whole[: -(-num_tokens // (WINDOW - 1))]


def score(llm: LLM, windows: Sequence[list[int]], first: int = 0) -> tuple[float, int]:
    """Return minus the sum of the log probabilities, and of how many tokens.

    Args:
        llm: The engine.
        windows: Of tokens.
        first: The place in a window of the first token that others are scored behind.
    """
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    loss, count = 0.0, 0
    for window in windows:
        (output,) = llm.generate([{"prompt_token_ids": window}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        told = list(zip(output.prompt_logprobs[1:], window[1:], strict=True))[first:]
        loss -= sum(entry[token].logprob for entry, token in told)
        count += len(told)
    return loss, count
