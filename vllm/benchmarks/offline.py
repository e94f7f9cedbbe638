"""``vllm bench latency`` and ``vllm bench throughput``: speed without HTTP."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm.benchmarks.datasets.build import make_prompts
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import TokenWords
from vllm.benchmarks.draws import Draws
from vllm.benchmarks.report.metrics import percentile
from vllm.exceptions import ConfigError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.engine_args import EngineArgs

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

_PERCENTS = (10, 25, 50, 75, 90, 99)
_STREAM = 21


def _make_llm(args: argparse.Namespace) -> LLM:
    # Late: the engine is wanted here only, and --help must not wait for it.
    from vllm.entrypoints.llm import LLM  # noqa: PLC0415

    defaults = vars(EngineArgs())
    settings = {
        name: value
        for name, value in vars(EngineArgs.from_cli_args(args)).items()
        if name != "model" and value != defaults[name]
    }
    return LLM(args.model, **settings)


def _words_of(llm: LLM) -> TokenWords:
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ConfigError(
            "Prompts are made of the model's tokens: leave --skip-tokenizer-init out."
        )
    return TokenWords(tokenizer)


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, top_p=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )


def run_latency(args: argparse.Namespace) -> int:
    """Time a batch again and again; prompts are new each time, so the prefix cache does nothing."""
    if min(args.batch_size, args.num_iters, args.input_len, args.output_len) < 1:
        raise ConfigError(
            "--batch-size, --num-iters, --input-len and --output-len must be above 0."
        )
    with _make_llm(args) as llm:
        words = _words_of(llm)
        draws = Draws(args.seed, _STREAM)

        def run() -> float:
            prompts = [
                {"prompt_token_ids": words.draw(draws, args.input_len)}
                for _ in range(args.batch_size)
            ]
            return _time(lambda: _generate(llm, prompts, [_params(args.output_len)] * len(prompts)))

        silent = True if args.disable_tqdm else None
        for _ in tqdm(range(args.num_iters_warmup), desc="warm-up", disable=silent):
            run()
        latencies = [run() for _ in tqdm(range(args.num_iters), desc="runs", disable=silent)]
    percentiles = {str(p): percentile(latencies, p) for p in _PERCENTS}
    print(f"Avg latency: {sum(latencies) / len(latencies):.4f} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value:.4f} seconds")
    result = {
        "model_id": args.model,
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": percentiles,
    }
    return _write(args.output_json, result)


def run_throughput(args: argparse.Namespace) -> int:
    """Give the engine all prompts at once and time the whole."""
    with _make_llm(args) as llm:
        words = _words_of(llm)
        requests = make_prompts(args, words)
        longest = llm.llm_engine.vllm_config.model_config.max_model_len
        _check_lengths(requests, longest)
        prompts = [{"prompt": request.prompt} for request in requests]
        params = [_params(request.num_output_tokens) for request in requests]
        outputs: list[Any] = []
        elapsed = _time(
            lambda: outputs.extend(_generate(llm, prompts, params, not args.disable_tqdm))
        )
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
    total = num_prompt + num_output
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total "
        f"tokens/s, {num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}")
    print(f"Total num output tokens:  {num_output}")
    print(f"Cached prompt tokens:     {num_cached} ({100 * num_cached / num_prompt:.2f}%)")
    result = {
        "model_id": args.model,
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": total / elapsed,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "cached_tokens": num_cached,
    }
    return _write(args.output_json, result)


def _check_lengths(requests: Sequence[BenchRequest], longest: int) -> None:
    need = max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    if need > longest:
        raise ConfigError(
            f"A prompt and its answer have {need} tokens, more than --max-model-len {longest}: "
            "raise it, or make them shorter."
        )


def _generate(
    llm: LLM, prompts: Sequence[Any], params: list[SamplingParams], shows_progress: bool = False
) -> list[Any]:
    return list(llm.generate(list(prompts), params, use_tqdm=shows_progress))


def _time(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _write(path: Path | None, result: dict[str, Any]) -> int:
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0
