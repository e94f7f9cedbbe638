"""Random weights of shapes that people run, as the files that racing engines read.

A format of ``FORMATS`` is a GGUF file; one of ``FOLDERS`` a folder with config.json and
safetensors, as releases on hubs have it. The output head is the embedding.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from tests.model_executor.model_loader.gguf_files import (
    ARCHITECTURES,
    OTHER_PARTS,
    PARTS,
    random_blocks,
    write_keys,
    write_tokenizer,
)
from tests.model_executor.model_loader.packed_formats import Format, encode
from tests.tokenizers.family_tokenizers import byte_level

Type = gguf.GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class Experts:
    """Those of a layer: how many there are, how many a token takes, their inner width."""

    num_experts: int
    num_taken: int
    width: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; ``inner`` is the width of layers without experts."""

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: Experts | None = None


SHAPES = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936),
    "gemma3-270m": Shape("gemma3", 640, 2048, 18, 4, 1, 256, 262144),
    "gemma3-1b": Shape("gemma3", 1152, 6912, 26, 4, 1, 256, 262144),
    # Layers as those of Qwen3-30B-A3B, a quarter of its experts, and a head of the same share.
    "qwen3-moe": Shape("qwen3-moe", 2048, 6144, 8, 32, 4, 128, 32768, Experts(32, 8, 768)),
}
# Of the matrices, and of the output head.
FORMATS = {
    "BF16": (Type.BF16, Type.BF16),
    "Q8_0": (Type.Q8_0, Type.Q8_0),
    "Q4_0": (Type.Q4_0, Type.Q6_K),
    "Q4_K": (Type.Q4_K, Type.Q6_K),
    "Q2_K": (Type.Q2_K, Type.Q6_K),
    "Q3_K": (Type.Q3_K, Type.Q6_K),
    "IQ2_XXS": (Type.IQ2_XXS, Type.Q6_K),
    "IQ3_XXS": (Type.IQ3_XXS, Type.Q6_K),
}
# bf16 matrices, four bits in groups of 128 as AWQ and GPTQ store them, and bytes by channel as
# compressed-tensors does.
FOLDERS: dict[str, Format | None] = {
    "bf16": None,
    "awq": Format("awq", group=128, is_symmetric=False),
    "gptq": Format("gptq", group=128),
    "int8": Format("int8", bits=8, group=0, scale_type=torch.bfloat16),
    "fp8": Format("fp8", bits=8, group=0, scale_type=torch.bfloat16),
}
_WINDOW, _LOCAL_LAYERS = 512, 5
# Blocks of most types; rows of Gemma 3's small models are not multiples of it.
_SUPERBLOCK = 256


def describe(shape: str, layers: int, vocab: int) -> dict[str, Any]:
    """Returns the config.json of a shape, perhaps of fewer layers or a smaller vocabulary."""
    own = SHAPES[shape]
    layers = layers or own.layers
    raw = {
        "hidden_size": own.hidden,
        "intermediate_size": own.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.kv_heads,
        "head_dim": own.head_dim,
        "vocab_size": vocab or own.vocab,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if own.family == "qwen3":
        names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        return raw | names | {"hidden_act": "silu"}
    if own.experts is not None:
        return raw | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "num_experts": own.experts.num_experts,
            "num_experts_per_tok": own.experts.num_taken,
            "moe_intermediate_size": own.experts.width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    kinds = ["sliding_attention"] * _LOCAL_LAYERS + ["full_attention"]
    return raw | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": own.head_dim,
        "sliding_window": _WINDOW,
        "sliding_window_pattern": len(kinds),
        "layer_types": [kinds[layer % len(kinds)] for layer in range(layers)],
        "rope_local_base_freq": 10_000.0,
    }


def _family(raw: Mapping[str, Any]) -> str:
    return str(raw["model_type"]).removesuffix("_text").replace("_", "-")


def _sizes(raw: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yields the matrices of a layer that are none of experts': name, rows and columns."""
    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim
    yield "self_attn.q_proj", queries, hidden
    yield "self_attn.k_proj", keys, hidden
    yield "self_attn.v_proj", keys, hidden
    yield "self_attn.o_proj", hidden, queries
    if "num_experts" not in raw:
        yield "mlp.gate_proj", inner, hidden
        yield "mlp.up_proj", inner, hidden
        yield "mlp.down_proj", hidden, inner


def _expert_sizes(raw: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yields the matrices of each expert of a layer, as ``_sizes`` does."""
    if "num_experts" in raw:
        hidden, width = raw["hidden_size"], raw["moe_intermediate_size"]
        yield "gate_proj", width, hidden
        yield "up_proj", width, hidden
        yield "down_proj", hidden, width


def _norms(raw: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields the norms of a layer: name and width."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if _family(raw) == "gemma3":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield name, raw["hidden_size"]
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        yield name, raw["head_dim"]


def _draw(kind: Any, rows: int, columns: int, seed: int) -> tuple[np.ndarray, Any]:
    """Returns a random matrix as a type stores it, and the type: rows may not fit its blocks."""
    if gguf.constants.GGML_QUANT_SIZES[kind][0] == _SUPERBLOCK and columns % _SUPERBLOCK:
        kind = Type.Q8_0
    size = columns**-0.5
    if kind == Type.BF16:
        values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
        return gguf.quants.quantize(values * size, kind), kind
    return random_blocks(kind, rows, columns, seed, size), kind


def _draw_router(raw: Mapping[str, Any], seed: int) -> np.ndarray:
    """Returns the matrix that chooses experts: any token may take any."""
    shape = (raw["num_experts"], raw["hidden_size"])
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values * np.float32(raw["hidden_size"] ** -0.5)


def write_gguf(raw: Mapping[str, Any], form: str, path: Path) -> None:
    """Writes random weights as a GGUF file of a format of FORMATS."""
    kind, head_kind = FORMATS[form]
    family, hidden = _family(raw), raw["hidden_size"]
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    write_keys(writer, family, {**raw, "rope_scaling": {"factor": 1.0}})
    write_tokenizer(writer, byte_level(), raw["vocab_size"])
    names = PARTS | OTHER_PARTS.get(family, {})

    def add(name: str, kind: Any, rows: int, columns: int, seed: int) -> None:
        matrix, stored = _draw(kind, rows, columns, seed)
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=stored)

    add("token_embd", head_kind, raw["vocab_size"], hidden, 1)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(raw["num_hidden_layers"]):
        for name, width in _norms(raw):
            writer.add_tensor(f"blk.{layer}.{names[name]}.weight", np.ones(width, np.float32))
        for i, (name, rows, columns) in enumerate(_sizes(raw)):
            add(f"blk.{layer}.{names[name]}", kind, rows, columns, 100 * layer + i)
        for i, (name, rows, columns) in enumerate(_expert_sizes(raw)):
            count, seed = raw["num_experts"], 100 * layer + 50 + i
            matrix, stored = _draw(kind, count * rows, columns, seed)
            stacked = matrix.reshape(count, rows, -1)
            part = names[f"mlp.{name}"]
            writer.add_tensor(f"blk.{layer}.{part}_exps.weight", stacked, raw_dtype=stored)
        if "num_experts" in raw:
            router = _draw_router(raw, 100 * layer + 60)
            writer.add_tensor(f"blk.{layer}.{names['mlp.gate']}.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(raw: Mapping[str, Any], form: str, folder: Path) -> None:
    """Writes random weights as a folder of a format of FOLDERS."""
    packed, tensors = FOLDERS[form], {}
    # Gemma's norms multiply by one more than is stored.
    norm = 0.0 if _family(raw) == "gemma3" else 1.0

    def random(rows: int, columns: int, seed: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        return values * columns**-0.5

    hidden = raw["hidden_size"]
    embedding = random(raw["vocab_size"], hidden, 1).bfloat16()
    tensors["model.embed_tokens.weight"] = embedding
    tensors["model.norm.weight"] = torch.full((hidden,), norm).bfloat16()
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, width in _norms(raw):
            tensors[f"{prefix}.{name}.weight"] = torch.full((width,), norm).bfloat16()
        sizes = list(_sizes(raw))
        for expert in range(raw.get("num_experts", 0)):
            stem = f"mlp.experts.{expert}"
            sizes += [(f"{stem}.{name}", *size) for name, *size in _expert_sizes(raw)]
        if "num_experts" in raw:
            router = torch.from_numpy(_draw_router(raw, 100 * layer + 60))
            tensors[f"{prefix}.mlp.gate.weight"] = router.bfloat16()
        for i, (name, rows, columns) in enumerate(sizes):
            matrix = random(rows, columns, 1000 * layer + i)
            if packed is None:
                tensors[f"{prefix}.{name}.weight"] = matrix.bfloat16()
                continue
            for part, value in encode(packed, matrix)[0].items():
                tensors[f"{prefix}.{name}.{part}"] = value
    folder.mkdir(parents=True)
    own = dict(raw) if packed is None else {**raw, "quantization_config": packed.config()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(own, indent=1))


def find_model(shape: str, layers: int, vocab: int, form: str, folder: Path) -> Path:
    """Returns a format's file or folder of weights, written unless an earlier run kept it."""
    suffix = "" if form in FOLDERS else ".gguf"
    path = folder / f"{shape}-{layers}-{vocab}-{form}{suffix}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        write = write_folder if form in FOLDERS else write_gguf
        write(describe(shape, layers, vocab), form, fresh)
        fresh.replace(path)
    return path
