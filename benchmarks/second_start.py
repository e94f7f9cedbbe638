"""What a start with ``--weights-cache-dir`` takes, the first time and the second.

    python -m benchmarks.second_start [--shape v4|qwen3-8b] [--layers N] [--folder DIR]

Writes a GGUF file of random blocks of a shape: ``qwen3-8b`` in Q4_K, or ``v4``: a DeepSeek-V4 with
sixteen experts in the mix that people have (IQ2_XXS gate and up, Q2_K down, Q8_0 and F16). Starts
servers over it one after the other: without the cache, the start that fills it, one that uses it.
One JSON line: seconds from the command until a server answers, a first request's, the memory that
its log foretold for the weights, with and without the pool of its cache, which its huge pages make
resident, and what its engine's process holds besides what one with a tiny model does, with the
pages of the packed copy and without.
"""

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

from benchmarks.live_server import LiveServer
from tests.model_executor.model_loader import gguf_v4
from tests.model_executor.model_loader.gguf_files import (
    Type,
    random_blocks,
    write_keys,
    write_tokenizer,
)
from tests.tokenizers.family_tokenizers import byte_level

_VOCAB = 16_384
_FORETOLD = re.compile(r"GGUF: .*, ([\d.]+) GB in memory")
_POOL_BYTES = 268_435_456
_FLAGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", str(_POOL_BYTES))


class _Writer:
    """Writes matrices of random blocks; those of one type and size share their bytes."""

    def __init__(self, path: Path, arch: str) -> None:
        self.gguf = gguf.GGUFWriter(path, arch)
        self._drawn: dict[Any, np.ndarray] = {}

    def matrix(self, name: str, kind: Type, *shape: int) -> None:
        """Add a matrix, or a stack of them."""
        rows, columns = int(np.prod(shape[:-1])), shape[-1]
        key = (kind, rows, columns)
        if key not in self._drawn:
            size = columns**-0.5
            rng = np.random.default_rng(len(self._drawn))
            self._drawn[key] = (
                (rng.standard_normal((rows, columns), np.float32) * size).astype(np.float16)
                if kind == Type.F16
                else random_blocks(kind, rows, columns, 1, size)
            )
        stored = self._drawn[key]
        self.gguf.add_tensor(
            name, stored.reshape(*shape[:-1], -1), raw_dtype=None if kind == Type.F16 else kind
        )

    def vector(self, name: str, *shape: int, value: float = 1.0) -> None:
        """Add equal numbers."""
        self.gguf.add_tensor(name, np.full(shape, value, np.float32))

    def close(self) -> None:
        """Write all of it."""
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def write_qwen3(path: Path, layers: int, hidden: int = 4096) -> None:
    """Write the shape of Qwen3-8B, with fewer tokens; or a tiny one."""
    inner, heads, key_heads = 3 * hidden, hidden // 128, max(1, hidden // 512)
    raw = {
        "max_position_embeddings": 32_768,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "intermediate_size": inner,
    }
    out = _Writer(path, "qwen3")
    write_keys(out.gguf, "qwen3", raw)
    write_tokenizer(out.gguf, byte_level(), _VOCAB)
    out.matrix("token_embd.weight", Type.Q4_K, _VOCAB, hidden)
    out.matrix("output.weight", Type.Q6_K, _VOCAB, hidden)
    out.vector("output_norm.weight", hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        out.vector(f"{block}.attn_norm.weight", hidden)
        out.vector(f"{block}.ffn_norm.weight", hidden)
        out.vector(f"{block}.attn_q_norm.weight", 128)
        out.vector(f"{block}.attn_k_norm.weight", 128)
        out.matrix(f"{block}.attn_q.weight", Type.Q4_K, heads * 128, hidden)
        for part in ("k", "v"):
            out.matrix(f"{block}.attn_{part}.weight", Type.Q4_K, key_heads * 128, hidden)
        out.matrix(f"{block}.attn_output.weight", Type.Q4_K, hidden, heads * 128)
        out.matrix(f"{block}.ffn_gate.weight", Type.Q4_K, inner, hidden)
        out.matrix(f"{block}.ffn_up.weight", Type.Q4_K, inner, hidden)
        out.matrix(f"{block}.ffn_down.weight", Type.Q4_K, hidden, inner)
    out.close()


def write_v4(path: Path, layers: int, experts: int = 16) -> None:
    """Write the shape of DeepSeek-V4 Flash with fewer experts, layers and tokens."""
    hidden, heads, dim, rank, groups, width = 4096, 64, 512, 1024, 8, 2048
    ratios = [0, 0, *(4 if i % 2 else 128 for i in range(layers - 2))]
    raw = {
        "max_position_embeddings": 65_536,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": dim,
        "sliding_window": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 10_000.0,
        "n_routed_experts": experts,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": width,
        "q_lora_rank": rank,
        "o_groups": groups,
        "o_lora_rank": rank,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "num_hash_layers": 1,
        "compress_ratios": ratios,
        "compress_rope_theta": 160_000.0,
        "vocab_size": _VOCAB,
    }
    out = _Writer(path, "deepseek4")
    gguf_v4.write_keys(out.gguf, raw, 0, has_tokens=False)
    write_tokenizer(out.gguf, byte_level(), _VOCAB)
    out.matrix("token_embd.weight", Type.F16, _VOCAB, hidden)
    out.matrix("output.weight", Type.Q8_0, _VOCAB, hidden)
    out.vector("output_norm.weight", hidden)
    out.matrix("output_hc_fn.weight", Type.F16, 4, 4 * hidden)
    out.vector("output_hc_base.weight", 4, value=0.0)
    out.vector("output_hc_scale.weight", 1)
    rng = np.random.default_rng(0)
    for layer, ratio in enumerate(ratios):
        block = f"blk.{layer}"
        for half in ("attn", "ffn"):
            out.matrix(f"{block}.hc_{half}_fn.weight", Type.F16, 24, 4 * hidden)
            out.vector(f"{block}.hc_{half}_base.weight", 24, value=0.0)
            out.vector(f"{block}.hc_{half}_scale.weight", 3)
            out.vector(f"{block}.{half}_norm.weight", hidden)
        out.vector(f"{block}.attn_sinks.weight", heads, value=0.0)
        out.vector(f"{block}.attn_q_a_norm.weight", rank)
        out.vector(f"{block}.attn_kv_a_norm.weight", dim)
        out.matrix(f"{block}.attn_q_a.weight", Type.Q8_0, rank, hidden)
        out.matrix(f"{block}.attn_q_b.weight", Type.Q8_0, heads * dim, rank)
        out.matrix(f"{block}.attn_kv.weight", Type.Q8_0, dim, hidden)
        out.matrix(f"{block}.attn_output_a.weight", Type.Q8_0, groups * rank, heads * dim // groups)
        out.matrix(f"{block}.attn_output_b.weight", Type.Q8_0, hidden, groups * rank)
        if ratio:
            times = 2 if ratio == 4 else 1
            for part in ("kv", "gate"):
                own = f"{block}.attn_compressor_{part}.weight"
                out.matrix(own, Type.F16, times * dim, hidden)
            out.vector(f"{block}.attn_compressor_ape.weight", ratio, times * dim, value=0.0)
            out.vector(f"{block}.attn_compressor_norm.weight", dim)
        if ratio == 4:
            out.matrix(f"{block}.indexer.attn_q_b.weight", Type.F16, 64 * 128, rank)
            out.matrix(f"{block}.indexer.proj.weight", Type.F16, 64, hidden)
            for part in ("kv", "gate"):
                out.matrix(f"{block}.indexer_compressor_{part}.weight", Type.F16, 256, hidden)
            out.vector(f"{block}.indexer_compressor_ape.weight", 4, 256, value=0.0)
            out.vector(f"{block}.indexer_compressor_norm.weight", 128)
        out.matrix(f"{block}.ffn_gate_inp.weight", Type.F16, experts, hidden)
        if layer:
            out.vector(f"{block}.exp_probs_b.bias", experts, value=0.0)
        else:
            table = rng.random((_VOCAB, experts)).argsort(-1)[:, :6].astype(np.int32)
            out.gguf.add_tensor(f"{block}.ffn_gate_tid2eid.weight", table)
        for part, kind in (("gate", Type.IQ2_XXS), ("up", Type.IQ2_XXS), ("down", Type.Q2_K)):
            shape = (hidden, width) if part == "down" else (width, hidden)
            out.matrix(f"{block}.ffn_{part}_exps.weight", kind, experts, *shape)
            out.matrix(f"{block}.ffn_{part}_shexp.weight", Type.Q8_0, *shape)
    out.close()


def measure(model: Path, *flags: str) -> dict[str, Any]:
    """Start a server, ask it once, and return what that took."""
    log = model.with_suffix(".log")
    began = time.monotonic()
    with LiveServer(log, str(model), *_FLAGS, *flags) as server:
        found: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 2)}
        body = {"model": str(model), "prompt": "Once upon a time", "max_tokens": 16}
        asked = time.monotonic()
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status()
        found["first_request_s"] = round(time.monotonic() - asked, 2)
        found |= read_memory(server.process.pid)
    foretold = _FORETOLD.search(log.read_text())
    assert foretold is not None, log.read_text()
    weights = float(foretold[1])
    return found | {"foretold_gb": weights, "with_pool_gb": round(weights + _POOL_BYTES / 1e9, 3)}


def read_memory(pid: int) -> dict[str, float]:
    """Return what the largest of a server's processes holds: all, and of packed copies alone."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    largest = {"resident_gb": 0.0, "of_copies_gb": 0.0}
    for process in (pid, *map(int, children)):
        sizes = {"resident_gb": 0, "of_copies_gb": 0}
        is_copy = False
        for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
            name = line.split(maxsplit=1)[0]
            if not name.endswith(":"):
                is_copy = line.endswith(".panels")
            elif name == "Rss:":
                own = int(line.split()[1]) * 1024
                sizes["resident_gb"] += own
                sizes["of_copies_gb"] += own if is_copy else 0
        if sizes["resident_gb"] > largest["resident_gb"] * 1e9:
            largest = {name: size / 1e9 for name, size in sizes.items()}
    return {name: round(size, 3) for name, size in largest.items()}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=("v4", "qwen3-8b"), default="v4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="Keeps the file for another run.")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = args.folder or Path(scratch)
        model, tiny = folder / f"{args.shape}-{args.layers}.gguf", Path(scratch) / "tiny.gguf"
        if not model.exists():
            (write_v4 if args.shape == "v4" else write_qwen3)(model, args.layers)
        write_qwen3(tiny, 1, 512)
        cache = ("--weights-cache-dir", str(Path(scratch) / "cache"))
        base = measure(tiny)
        # Its prompts have tokens of their own, which those of the embedded model are.
        own = ("--tokenizer", "deepseek-v4") if args.shape == "v4" else ()
        runs = {"without": measure(model, *own), "first": measure(model, *own, *cache)}
        runs["second"] = measure(model, *own, *cache)
        for run in runs.values():
            run["weights_gb"] = round(run["resident_gb"] - base["resident_gb"], 3)
        size = model.stat().st_size / 1e9
    print(json.dumps({"shape": args.shape, "layers": args.layers, "file_gb": size, **runs}))


if __name__ == "__main__":
    main()
