"""Decode and prefill speed against transformers' generate, same weights, one run.

    python -m benchmarks.engine [--repeats 3]

Builds a random fp32 DeepSeek-V4 of about 28M parameters, saves it with transformers, and measures
both on the same prompts: decode tokens/s at batch 1 and 8, prefill tokens/s at 2,048. The engine
runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), with prefix caching off so that repeats
do real work. Timings are noisy: read the ratios of one run. One JSON line.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from benchmarks.result import percentiles, print_result
from vllm import LLM, SamplingParams

CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "layer_types": ["sliding_attention"]
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 3
    + ["compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 6,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SEED = 0
PROMPT_LEN = 64
DECODE_TOKENS = 64
PREFILL_LEN = 2048


def build_reference(folder: Path) -> Any:
    """Make the random model, save it to ``folder`` and return transformers' module."""
    torch.manual_seed(SEED)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**CONFIG)).eval().float()
    model.save_pretrained(folder)
    assets = Path(__file__).resolve().parent.parent / "vllm" / "assets" / "deepseek-v4"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets / name, folder / name)
    return model


def make_prompts(batch: int, length: int, num_ids: int) -> list[list[int]]:
    """Return random token ids below ``num_ids``, reproducible."""
    rng = random.Random(SEED + batch + length)
    return [[rng.randrange(5, num_ids) for _ in range(length)] for _ in range(batch)]


Generate = Callable[[list[list[int]], int], None]


def reference_generate(model: Any) -> Generate:
    """Return greedy generation by transformers."""

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=2,
            )

    return generate


def engine_generate(**settings: Any) -> Generate:
    """Return greedy generation by this engine; ``settings`` are ``LLM``'s."""
    llm = LLM(
        max_model_len=4096,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        **settings,
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


def time_s(run: Callable[[], None]) -> float:
    """Return the seconds a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(generate: Generate, num_ids: int, num_decoded: int) -> dict[str, float]:
    """Measure once: decode tokens/s at batch 1 and 8, prefill tokens/s at 2,048.

    Args:
        generate: The engine.
        num_ids: Prompts are of token ids below.
        num_decoded: Tokens of a timed answer.
    """
    values = {}
    for batch in (1, 8):
        prompts = make_prompts(batch, PROMPT_LEN, num_ids)
        short = time_s(lambda prompts=prompts: generate(prompts, 1))  # type: ignore[misc]
        long = time_s(lambda prompts=prompts: generate(prompts, 1 + num_decoded))  # type: ignore[misc]
        values[f"decode_tokens_per_s_batch_{batch}"] = batch * num_decoded / (long - short)
    prompts = make_prompts(1, PREFILL_LEN, num_ids)
    seconds = time_s(lambda: generate(prompts, 1))
    values["prefill_tokens_per_s_2048"] = PREFILL_LEN / seconds
    return values


def compare(
    engines: Mapping[str, Generate], repeats: int, num_ids: int, num_decoded: int
) -> dict[str, Any]:
    """Alternate ``transformers`` and ``engine``, so that noise falls on both.

    Returns:
        Per metric the percentiles of each, and the ratio of the medians.
    """
    samples: dict[str, list[dict[str, float]]] = {key: [] for key in engines}
    for generate in engines.values():
        measure(generate, num_ids, num_decoded)  # warm-up
    for _ in range(repeats):
        for key, generate in engines.items():
            samples[key].append(measure(generate, num_ids, num_decoded))
    values: dict[str, Any] = {}
    for metric in samples["engine"][0]:
        per_engine = {
            key: percentiles([sample[metric] for sample in runs]) for key, runs in samples.items()
        }
        ratio = per_engine["engine"]["p50"] / per_engine["transformers"]["p50"]
        values[metric] = {**per_engine, "ratio": round(ratio, 3)}
    return values


def main() -> None:
    """Compare the two engines and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_reference(folder)
        num_parameters = sum(p.numel() for p in model.parameters())
        engines = {
            "transformers": reference_generate(model),
            "engine": engine_generate(model=str(folder), block_size=32),
        }
        values = compare(engines, args.repeats, CONFIG["vocab_size"] - 64, DECODE_TOKENS)
    config = {"parameters": num_parameters, "dtype": "float32", "seed": SEED, "n": args.repeats}
    print_result("engine", config, values)


if __name__ == "__main__":
    main()
