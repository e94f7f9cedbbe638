"""Speed of other families against transformers' generate, same weights, one run.

    python -m benchmarks.families [--family gemma3|qwen3] [--dtype float32|bfloat16] [--repeats 3]

Builds a random model of 100 to 200M parameters, saves it with transformers, and measures both on
the same prompts: decode tokens/s at batch 1 and 8, prefill tokens/s at 2,048. The engine runs in
this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``), with prefix caching off so that repeats do real
work. Timings are noisy: read the ratios of one run. One JSON line.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine import SEED, compare, engine_generate, reference_generate
from benchmarks.result import print_result

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
DECODE_TOKENS = 32


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


def main() -> None:
    """Compare the two engines and print one JSON line."""
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
        engine = engine_generate(model=str(folder), dtype=args.dtype, skip_tokenizer_init=True)
        engines = {"transformers": reference_generate(model), "engine": engine}
        values = compare(engines, args.repeats, _COMMON["vocab_size"], DECODE_TOKENS)
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
