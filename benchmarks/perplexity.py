"""What each way of storing weights costs in answers: ``python -m benchmarks.perplexity``.

The embedded model reads conversations that ``tools.embedded_model`` makes, with a seed that its
training did not use, and its perplexity over the answers in them is taken: as fp32, and with its
matrices rounded in each way. (Other text it cannot predict.) Four-bit weights are
written as the plain values that they mean; packed ones have the same.
Prints a table.
"""

import argparse
import math
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from benchmarks.weight_types import ASSETS, store_all
from tools.embedded_model.batches import Batch, Encoder, make_batch
from tools.embedded_model.conversations import Recipe
from vllm import LLM, SamplingParams

_PLAIN = ("embed", "head", "norm", "hc_", "ffn.gate.", ".ape")
_MAX_CODE, _MIN_CODE = 7, -8


def round_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Returns a matrix as four-bit codes times a scale for each group of a row."""
    parts = []
    for part in weight.float().split(group, 1):
        scale = part.abs().amax(1, keepdim=True) / _MAX_CODE
        codes = (part / scale.clamp_min(1e-30)).round().clamp(_MIN_CODE, _MAX_CODE)
        parts.append(codes * scale)
    return torch.cat(parts, 1)


def store_groups(source: Path, folder: Path, group: int) -> Path:
    """Writes the checkpoint with its matrices rounded to four bits, as fp32."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for name, value in tensors.items():
        if value.dim() == 2 and not any(part in name for part in _PLAIN):
            tensors[name] = round_groups(value, group)
    save_file(tensors, folder / "model.safetensors")
    return folder


def measure(folder: Path, settings: dict[str, Any], batch: Batch) -> tuple[float, float]:
    """Returns the perplexity over answers, and the share of true tokens ranked first."""
    llm = LLM(
        model=str(folder),
        max_model_len=batch.ids.shape[1] + 8,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=128 << 20,
        **settings,
    )
    pieces = batch.ids.tolist()
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    losses, firsts = [], []
    prompts: list[Any] = [{"prompt_token_ids": piece} for piece in pieces]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for piece, weights, output in zip(pieces, batch.weights.tolist(), outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, weight, row in zip(piece, weights, output.prompt_logprobs, strict=True):
            if weight:
                assert row is not None
                losses.append(-row[token].logprob)
                firsts.append(row[token].rank == 1)
    return math.exp(sum(losses) / len(losses)), sum(firsts) / len(firsts)


def main() -> None:
    """Prints a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--length", type=int, default=640, help="tokens of each")
    parser.add_argument("--seed", type=int, default=31_000)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    encoder = Encoder(tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json")))
    recipe = Recipe(length=args.length, repeats=0.0, chats=0.3)
    batch = make_batch(encoder, random.Random(args.seed), recipe, args.conversations, 0.0)
    print("| weights | perplexity | against fp32 | true token first |")
    print("| --- | --: | --: | --: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = store_all(ASSETS, folder / "stored")
        plain: dict[str, Any] = {"dtype": "float32"}
        stored["int8, int8 inputs"] = (ASSETS, {**plain, "quantization": "w8a8_int8"})
        for group in (32, 128):
            written = store_groups(ASSETS, folder / f"int4-{group}", group)
            stored[f"int4, groups of {group}"] = (written, plain)
        exact = 0.0
        for kind, (source, settings) in stored.items():
            value, first = measure(source, settings, batch)
            exact = exact or value
            change = 100 * (value / exact - 1)
            print(f"| {kind} | {value:.4f} | {change:+.2f}% | {100 * first:.1f}% |", flush=True)


if __name__ == "__main__":
    main()
