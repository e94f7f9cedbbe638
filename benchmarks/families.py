"""Speed of other families against transformers' generate, same weights, one run.

    python -m benchmarks.families [--family gemma3|qwen3|qwen3_5|qwen3_5_0.8b]
        [--dtype float32|bfloat16] [--repeats 3] [--clock cpu] [--short]
        [--with transformers,engine]

Builds a random model of 100 to 200M parameters, or the last of 750M, saves it with transformers,
and measures as ``benchmarks.engine`` does. ``bandwidth`` compares the bytes of weights that decode
steps at batch 1 read in a second with those that this machine reads at most, by a sum over 512 MiB
in the same run. One JSON line.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine import CLOCKS, SEED, add_arguments, compare, make_engines
from benchmarks.result import print_result

_COMMON: dict[str, Any] = {
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# A Gemma 3 270M with a smaller vocabulary; a Qwen 3 0.6B and a Qwen 3.5 0.8B with fewer layers and
# tokens.
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
    "qwen3_5": {
        **_COMMON,
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
}
# The whole of it.
CONFIGS["qwen3_5_0.8b"] = {**CONFIGS["qwen3_5"], "num_hidden_layers": 24, "vocab_size": 248_320}
DECODE_TOKENS = 32
# Batches, prompt and tokens of --short.
SHORT: dict[str, Any] = {"batches": (1, 8), "prefill_len": 512}
SHORT_TOKENS = 8


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


def measure_bandwidth(clock: Callable[[], float]) -> float:
    """Return the most GB/s that a sum over 512 MiB was seen to read at."""
    values = torch.ones(128 << 20)
    rates = []
    for _ in range(8):
        begin = clock()
        values.sum()
        rates.append(values.nbytes / (clock() - begin) / 1e9)
    return max(rates)


def main() -> None:
    """Compare the two engines and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=tuple(CONFIGS), default="gemma3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--short", action="store_true", help="Smaller batches, prompt, answers.")
    add_arguments(parser)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_reference(args.family, getattr(torch, args.dtype), folder)
        num_parameters = sum(p.numel() for p in model.parameters())
        engines = make_engines(
            model, args.engines, model=str(folder), dtype=args.dtype, skip_tokenizer_init=True
        )
        clock = CLOCKS[args.clock]
        tokens, sizes = (SHORT_TOKENS, SHORT) if args.short else (DECODE_TOKENS, {})
        values = compare(engines, args.repeats, _COMMON["vocab_size"], tokens, clock, **sizes)
    # Tied embeddings count once, as the output head.
    num_bytes = sum(p.nbytes for p in model.parameters())
    rate = values["decode_tokens_per_s_batch_1"]["engine"]["p50"] * num_bytes / 1e9
    most = measure_bandwidth(clock)
    values["bandwidth"] = {
        "weights_gb_per_s": round(rate, 2),
        "machine_gb_per_s": round(most, 2),
        "share": round(rate / most, 3),
    }
    config = {
        "family": args.family,
        "parameters": num_parameters,
        "dtype": args.dtype,
        "clock": args.clock,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "n": args.repeats,
    }
    print_result("families", config, values)


if __name__ == "__main__":
    main()
