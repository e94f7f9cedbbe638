"""What each type of weights does to answers and to speed, against fp32, in one run.

    python -m benchmarks.weight_types [--prompts 8] [--tokens 48]

Two models: the embedded one, which is trained, and the random DeepSeek-V4 of
``benchmarks.engine``. Each is stored as fp32, bf16, fp8 and fp4 (published spelling)
and int8 (made at load), and decodes greedily behind the same prompts. ``agreement`` is the share of
answer tokens up to the first that differs from fp32's, ``logit_error`` the mean distance of the
logits behind the prompts over their standard deviation, ``step_ms`` processor time of a decode step
at batch 1. One JSON line.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import CONFIG, build_reference, make_prompts
from benchmarks.result import print_result
from tools.checkpoints.published_spelling import Spelling
from tools.checkpoints.quantise import quantise_checkpoint
from vllm import LLM, SamplingParams

ASSETS = Path(__file__).resolve().parent.parent / "vllm" / "assets" / "deepseek-v4"
PROMPT_LEN = 48


def store_all(source: Path, folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return where each type of a plain checkpoint lies, and the settings it is served with."""
    stored: dict[str, tuple[Path, dict[str, Any]]] = {
        "fp32": (source, {"dtype": "float32"}),
        "bf16": (source, {"dtype": "bfloat16", "kv_cache_dtype": "float32"}),
        "int8": (source, {"dtype": "float32", "quantization": "int8"}),
    }
    for name in ("fp8", "fp4"):
        quantise_checkpoint(source, folder / name, Spelling(expert_dtype=name))
        stored[name] = (folder / name, {"dtype": "float32"})
    return stored


def answer(
    folder: Path, settings: dict[str, Any], prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[dict[int, float]], float]:
    """Return the greedy answers, the first tokens' log probabilities and a step's milliseconds."""
    llm = LLM(
        model=str(folder),
        max_model_len=1024,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        max_logprobs=-1,
        speculative_config={"method": "none"},
        **settings,
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True)
    rows = []
    for output in llm.generate(inputs, one, use_tqdm=False):
        assert output.outputs[0].logprobs is not None
        first = output.outputs[0].logprobs[0]
        rows.append({token: item.logprob for token, item in first.items()})
    spent = []
    for count in (1, 1 + num_tokens):
        alone = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begin = time.process_time()
        llm.generate(inputs[:1], alone, use_tqdm=False)
        spent.append(time.process_time() - begin)
    return tokens, rows, 1000 * (spent[1] - spent[0]) / num_tokens


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Return the share of tokens before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (mine, other) in pairs if mine != other), len(ours)) / len(ours)


def distance(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Return how far two rows of log probabilities are apart, in deviations of the second."""
    exact = list(theirs.values())
    errors = [abs(ours[token] - value) for token, value in theirs.items()]
    return statistics.fmean(errors) / statistics.pstdev(exact)


def compare(
    stored: dict[str, tuple[Path, dict[str, Any]]], prompts: Sequence[list[int]], num_tokens: int
) -> dict[str, Any]:
    """Answer with every type; the first is what the others are compared with."""
    values: dict[str, Any] = {}
    exact: tuple[list[list[int]], list[dict[int, float]]] | None = None
    for name, (folder, settings) in stored.items():
        tokens, rows, step_ms = answer(folder, settings, prompts, num_tokens)
        exact = exact or (tokens, rows)
        shares = [agreement(*pair) for pair in zip(tokens, exact[0], strict=True)]
        errors = [distance(*pair) for pair in zip(rows, exact[1], strict=True)]
        values[name] = {
            "agreement": round(statistics.fmean(shares), 3),
            "equal_answers": sum(share == 1 for share in shares),
            "first_tokens": sum(a[0] == b[0] for a, b in zip(tokens, exact[0], strict=True)),
            "logit_error": round(statistics.fmean(errors), 4),
            "step_ms": round(step_ms, 2),
        }
    return values


def main() -> None:
    """Compare all types on both models and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_grad_enabled(False)
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_reference(folder / "random")
        models = {
            "random": (folder / "random", CONFIG["vocab_size"] - 64),
            "embedded": (ASSETS, 1000),
        }
        for model, (source, num_ids) in models.items():
            (folder / f"{model}-stored").mkdir()
            stored = store_all(source, folder / f"{model}-stored")
            prompts = [
                prompt
                for index in range(args.prompts)
                for prompt in make_prompts(1, PROMPT_LEN + index, num_ids)
            ]
            values[model] = compare(stored, prompts, args.tokens)
    print_result("weight_types", {"prompts": args.prompts, "tokens": args.tokens}, values)


if __name__ == "__main__":
    main()
