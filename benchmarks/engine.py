"""Decode and prefill speed against transformers' generate, same weights, one run.

    python -m benchmarks.engine [--repeats 3] [--clock cpu] [--with transformers,torch,engine]

Builds a random fp32 DeepSeek-V4 of about 28M parameters, saves it with transformers, and measures
on the same prompts: decode tokens/s at batch 1, 8 and 32, prefill tokens/s at 2,048; of
transformers, of the engine on torch alone (``VLLM_NATIVE=0``) and of the engine. The engine runs in
this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), with prefix caching off so that repeats do real
work. Timings are noisy: read the ratios of one run; on a machine that others use, take processor
time (``--clock cpu``, with OMP_NUM_THREADS=1). One JSON line.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
BATCHES = (1, 8, 32)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


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
        **{"speculative_config": {"method": "none"}, **settings},
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


def make_engines(reference: Any, names: str, **settings: Any) -> dict[str, Generate]:
    """Return what to measure, by name; ``settings`` are ``LLM``'s.

    Args:
        reference: transformers' model.
        names: Some of transformers, torch and engine, by comma.
    """
    made: dict[str, Generate] = {}
    for name in names.split(","):
        if name == "transformers":
            made[name] = reference_generate(reference)
            continue
        os.environ["VLLM_NATIVE"] = "0" if name == "torch" else "1"
        made[name] = engine_generate(**settings)
    return made


def measure(
    generate: Generate,
    num_ids: int,
    num_decoded: int,
    clock: Callable[[], float],
    batches: Sequence[int] = BATCHES,
    prefill_len: int = PREFILL_LEN,
) -> dict[str, float]:
    """Measure once: decode tokens/s at some batches, prefill tokens/s.

    Args:
        generate: The engine.
        num_ids: Prompts are of token ids below.
        num_decoded: Tokens of a timed answer.
        clock: Seconds.
        batches: Of decode.
        prefill_len: Tokens of the prompt.
    """

    def time_s(prompts: list[list[int]], num_tokens: int) -> float:
        begin = clock()
        generate(prompts, num_tokens)
        return clock() - begin

    values = {}
    for batch in batches:
        prompts = make_prompts(batch, PROMPT_LEN, num_ids)
        short, long = time_s(prompts, 1), time_s(prompts, 1 + num_decoded)
        values[f"decode_tokens_per_s_batch_{batch}"] = batch * num_decoded / (long - short)
    prompts = make_prompts(1, prefill_len, num_ids)
    values[f"prefill_tokens_per_s_{prefill_len}"] = prefill_len / time_s(prompts, 1)
    return values


def compare(
    engines: Mapping[str, Generate],
    repeats: int,
    num_ids: int,
    num_decoded: int,
    clock: Callable[[], float] = time.perf_counter,
    **sizes: Any,
) -> dict[str, Any]:
    """Alternate the engines, so that noise falls on all; ``sizes`` are ``measure``'s.

    Returns:
        Per metric the percentiles of each, and how often the others' medians go into ``engine``'s.
    """
    samples: dict[str, list[dict[str, float]]] = {key: [] for key in engines}
    for generate in engines.values():
        measure(generate, num_ids, 4, clock, **sizes)  # warm-up
    for _ in range(repeats):
        for key, generate in engines.items():
            samples[key].append(measure(generate, num_ids, num_decoded, clock, **sizes))
    values: dict[str, Any] = {}
    for metric in samples["engine"][0]:
        per_engine = {
            key: percentiles([sample[metric] for sample in runs]) for key, runs in samples.items()
        }
        ours = per_engine["engine"]["p50"]
        ratios = {
            f"ratio_to_{key}": round(ours / found["p50"], 3)
            for key, found in per_engine.items()
            if key != "engine"
        }
        values[metric] = {**per_engine, **ratios}
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``benchmarks.families`` takes too."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--with", dest="engines", default="transformers,torch,engine")


def main() -> None:
    """Compare the engines and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_reference(folder)
        num_parameters = sum(p.numel() for p in model.parameters())
        engines = make_engines(model, args.engines, model=str(folder), block_size=32)
        num_ids, clock = CONFIG["vocab_size"] - 64, CLOCKS[args.clock]
        values = compare(engines, args.repeats, num_ids, DECODE_TOKENS, clock)
    config = {
        "parameters": num_parameters,
        "dtype": "float32",
        "clock": args.clock,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "n": args.repeats,
    }
    print_result("engine", config, values)


if __name__ == "__main__":
    main()
