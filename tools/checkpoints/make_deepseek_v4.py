"""The embedded checkpoint's configuration, and untrained weights of its shape.

    python -m tools.checkpoints.make_deepseek_v4 --out FOLDER

writes a checkpoint like the embedded one with random weights. Running it again gives the same
bytes, on any machine: the numbers come from integer draws and IEEE arithmetic alone. The embedded
weights themselves are trained by ``tools/embedded_model``. Torch-free.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.checkpoints.deepseek_v4_tensors import Array, tensor_specs

SEED = 20260424
EMBEDDED = Path(__file__).resolve().parents[2] / "vllm" / "assets" / "deepseek-v4"
CORPUS = EMBEDDED / "corpus.txt"

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"

CONFIG: dict[str, Any] = {
    "vllm_note": "A small model trained by tools/embedded_model to look facts up in its context. "
    "Not a release of DeepSeek; it has that model's architecture at a size that runs on any "
    "machine.",
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 300,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 16384,
    "num_nextn_predict_layers": 1,
    "vocab_size": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.2,
    "top_p": 1.0,
}

_ITEM_BYTES = {"I64": 8, "F32": 4, "BF16": 2}


def make_checkpoint(out: Path, embedded: Path = EMBEDDED) -> None:
    """Write an untrained checkpoint into the folder ``out``, with the embedded one's tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    write_texts(out, (embedded / "tokenizer.json").read_text(encoding="utf-8"))
    (out / "model.safetensors").write_bytes(make_weights(CONFIG, SEED))


def write_texts(out: Path, tokenizer: str) -> None:
    """Write every file but the weights; ``tokenizer`` is the text of tokenizer.json."""
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(out / "tokenizer_config.json", _tokenizer_config())
    _write_json(out / "config.json", CONFIG)
    _write_json(out / "generation_config.json", GENERATION_CONFIG)


def make_weights(config: dict[str, Any], seed: int) -> bytes:
    """Return the content of model.safetensors; each tensor has its own stream of random numbers."""
    specs = tensor_specs(config)
    # Widest first, so that every tensor is aligned to its item size.
    names = sorted(specs, key=lambda name: (-_ITEM_BYTES[specs[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks = []
    offset = 0
    for name in names:
        spec = specs[name]
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        # RandomState's streams are frozen by numpy's compatibility policy, Generator's are not.
        random = np.random.RandomState(int.from_bytes(digest[:4], "little"))
        chunk = _to_bytes(spec.init(random, spec.shape), spec.dtype)
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        chunks.append(chunk)
        offset += len(chunk)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _to_bytes(values: Array, dtype: str) -> bytes:
    if dtype == "I64":
        return values.astype("<i8").tobytes()
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    # Round to the nearest bfloat16, ties to even: numpy has no such type.
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def main() -> None:
    """Write the checkpoint into the folder given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    make_checkpoint(arguments.out)


if __name__ == "__main__":
    main()
