"""Speed of other families against transformers' generate, same weights, one run.

    python -m benchmarks.families [--family gemma3|qwen3] [--dtype float32|bfloat16] [--repeats 3]

Builds a random model of 100 to 200M parameters, saves it with transformers, and measures both on
the same prompts: decode tokens/s at batch 1 and 8, prefill tokens/s at 2,048. The engine runs in
this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), with prefix caching off so that repeats do real
work. Timings are noisy: read the ratios of one run. One JSON line.
"""

import argparse
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine import Generate, reference_generate, time_s
from benchmarks.result import percentiles, print_result
from vllm import LLM, SamplingParams

_COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# A Gemma 3 270M with a smaller vocabulary, and a Qwen 3 0.6B with fewer layers and tokens.
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
SEED = 0
PROMPT_LEN = 64
DECODE_TOKENS = 32
PREFILL_LEN = 2048


def build_reference(family: str, dtype: torch.dtype, folder: Path) -> Any:
    """Make the random model, save it to ``folder`` and return transformers' module."""
    torch.manual_seed(SEED)
    config = dict(CONFIGS[family])
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    model = model.train(False).to(dtype)
    model.save_pretrained(folder)
    return model


def engine_generate(folder: Path, dtype: str) -> Generate:
    """Return greedy generation by this engine."""
    llm = LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        assert all(len(out.outputs[0].token_ids) == num_tokens for out in outputs)

    return generate


def make_prompts(batch: int, length: int) -> list[list[int]]:
    """Return random token ids, reproducible."""
    rng = random.Random(SEED + batch + length)
    return [[rng.randrange(5, _COMMON["vocab_size"]) for _ in range(length)] for _ in range(batch)]


def measure(generate: Generate) -> dict[str, float]:
    """Measure once: decode tokens/s at batch 1 and 8, prefill tokens/s at 2,048."""
    values = {}
    for batch in (1, 8):
        prompts = make_prompts(batch, PROMPT_LEN)
        short = time_s(lambda prompts=prompts: generate(prompts, 1))  # type: ignore[misc]
        long = time_s(lambda prompts=prompts: generate(prompts, 1 + DECODE_TOKENS))  # type: ignore[misc]
        values[f"decode_tokens_per_s_batch_{batch}"] = batch * DECODE_TOKENS / (long - short)
    prompts = make_prompts(1, PREFILL_LEN)
    seconds = time_s(lambda: generate(prompts, 1))
    values["prefill_tokens_per_s_2048"] = PREFILL_LEN / seconds
    return values


def main() -> None:
    """Alternate the two engines, so that noise falls on both, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=tuple(CONFIGS), default="gemma3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_reference(args.family, getattr(torch, args.dtype), folder)
        num_parameters = sum(p.numel() for p in model.parameters())
        engines = {
            "transformers": reference_generate(model),
            "engine": engine_generate(folder, args.dtype),
        }
        samples: dict[str, list[dict[str, float]]] = {key: [] for key in engines}
        for generate in engines.values():
            measure(generate)  # warm-up
        for _ in range(args.repeats):
            for key, generate in engines.items():
                samples[key].append(measure(generate))
    values: dict[str, Any] = {}
    for metric in samples["engine"][0]:
        per_engine = {
            key: percentiles([sample[metric] for sample in runs]) for key, runs in samples.items()
        }
        ratio = per_engine["engine"]["p50"] / per_engine["transformers"]["p50"]
        values[metric] = {**per_engine, "ratio": round(ratio, 3)}
    config = {
        "family": args.family,
        "parameters": num_parameters,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "n": args.repeats,
    }
    print_result("families", config, values)


if __name__ == "__main__":
    main()
