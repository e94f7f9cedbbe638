"""Makes the embedded checkpoint: a small, untrained DeepSeek-V4 of the real architecture.

    python -m vllm.assets.make_deepseek_v4 --out vllm/assets/deepseek-v4

Running it again gives the same bytes, on any machine: the numbers come from integer draws and IEEE
arithmetic alone, and the tokenizer from a corpus that lies beside the checkpoint. Torch-free.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

SEED = 20260424
CORPUS = Path(__file__).resolve().parent / "deepseek-v4" / "corpus.txt"

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# The order of the release, at the end of the vocabulary. True: hidden when special tokens are
# skipped. The think and tool marks are not, as parsers of the text look for them.
_LATE_TOKENS = {
    "<｜fim▁hole｜>": True,
    "<｜fim▁begin｜>": True,
    "<｜fim▁end｜>": True,
    "<｜User｜>": True,
    "<｜Assistant｜>": True,
    "<think>": False,
    "</think>": False,
    "｜DSML｜": False,
    "<｜latest_reminder｜>": True,
    "<｜action｜>": True,
    "<｜query｜>": True,
    "<｜authority｜>": True,
    "<｜domain｜>": True,
    "<｜title｜>": True,
    "<｜read_url｜>": True,
}

CONFIG: dict[str, Any] = {
    "vllm_note": "Untrained: random weights from vllm/assets/make_deepseek_v4.py. Not a release of "
    "DeepSeek; it has that model's architecture at a size that runs on any machine.",
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
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
    "rope_theta": 10000,
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
    "vocab_size": 3584,
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
    "temperature": 1.0,
    "top_p": 1.0,
}

_ITEM_BYTES = {"I64": 8, "F32": 4, "BF16": 2}

Array = npt.NDArray[Any]
Init = Callable[[np.random.RandomState, tuple[int, ...]], Array]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the checkpoint: its shape, its safetensors dtype and how it is drawn."""

    shape: tuple[int, ...]
    dtype: str
    init: Init


def tensor_specs(config: dict[str, Any]) -> dict[str, TensorSpec]:
    """Return every tensor of a checkpoint with ``config``, by published name."""
    specs = dict(_model_level_specs(config))
    for i in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][i]
        is_hashed = i < config["num_hash_layers"]
        specs.update(_block_specs(config, f"layers.{i}.", ratio, is_hashed))
    for i in range(config["num_nextn_predict_layers"]):
        specs.update(_mtp_specs(config, f"mtp.{i}."))
    return specs


def make_checkpoint(out: Path, corpus: Path = CORPUS) -> None:
    """Write the checkpoint's files into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus.read_text(encoding="utf-8"), CONFIG["vocab_size"])
    (out / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_json(out / "tokenizer_config.json", _tokenizer_config())
    _write_json(out / "config.json", CONFIG)
    _write_json(out / "generation_config.json", GENERATION_CONFIG)
    (out / "model.safetensors").write_bytes(make_weights(CONFIG, SEED))


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


def train_tokenizer(corpus: str, vocab_size: int) -> tokenizers.Tokenizer:
    """Train the byte-level BPE.

    Raises:
        ValueError: The corpus is too small for ``vocab_size``.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_LATE_TOKENS),
        special_tokens=[_added_token(token, special=True) for token in (BOS, EOS, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus], trainer)
    tokenizer.add_tokens([_added_token(t, special) for t, special in _LATE_TOKENS.items()])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"The corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}: add text."
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def _added_token(text: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, normalized=False, special=special)


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


# --- how values are drawn -----------------------------------------------------------------------


def _gaussian(random: np.random.RandomState, shape: tuple[int, ...]) -> Array:
    """Draw nearly normal values (mean 0, deviation 1) as a sum of 12 uniform integers.

    Logarithms and cosines differ in the last bit between C libraries; sums of integers do not.
    """
    draws = random.randint(0, 1 << 16, size=(12, *shape), dtype=np.int64)
    total: Array = draws.sum(axis=0)
    return (total - 6 * 65535) / 65536.0


def _normal(std: float, mean: float = 0.0) -> Init:
    return lambda random, shape: mean + std * _gaussian(random, shape)


def _linear(out_features: int, in_features: int) -> TensorSpec:
    """A matrix that keeps the scale of its input."""
    return TensorSpec((out_features, in_features), "BF16", _normal(in_features**-0.5))


def _norm(size: int) -> TensorSpec:
    return TensorSpec((size,), "BF16", _normal(0.1, mean=1.0))


def _float32(shape: tuple[int, ...], std: float, mean: float = 0.0) -> TensorSpec:
    return TensorSpec(shape, "F32", _normal(std, mean))


def _hash_table(num_experts: int, top_k: int) -> Init:
    """Choose ``top_k`` different experts for each token id."""

    def draw(random: np.random.RandomState, shape: tuple[int, ...]) -> Array:
        keys = random.randint(0, 1 << 30, size=(shape[0], num_experts), dtype=np.int64)
        return np.argsort(keys, axis=1, kind="stable")[:, :top_k]

    return draw


def _mix_base(n: int) -> Init:
    """Biases of a hyper-connection's [pre n | post n | mixing n x n], without noise:

    pre = 1/n (the sublayer reads the streams' mean), post = 1, mixing close to the identity.
    """

    def draw(random: np.random.RandomState, shape: tuple[int, ...]) -> Array:
        base = np.concatenate(
            [np.full(n, _PRE_BIAS), np.zeros(n), 2.0 * np.eye(n, dtype=np.float64).reshape(-1)]
        )
        return base + 0.2 * _gaussian(random, shape)

    return draw


_PRE_BIAS = -1.1  # sigmoid(-1.1) = 0.25 = 1 / hc_mult
_MIX_SCALE = 0.3  # how far the streams themselves sway their mixing


def _to_bytes(values: Array, dtype: str) -> bytes:
    if dtype == "I64":
        return values.astype("<i8").tobytes()
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    # Round to the nearest bfloat16, ties to even: numpy has no such type.
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


# --- the tensors --------------------------------------------------------------------------------


def _model_level_specs(config: dict[str, Any]) -> Iterator[tuple[str, TensorSpec]]:
    d, vocab = config["hidden_size"], config["vocab_size"]
    yield "embed.weight", TensorSpec((vocab, d), "BF16", _normal(1.0))
    # Logits of deviation 2.8: neither flat nor frozen.
    yield "head.weight", TensorSpec((vocab, d), "BF16", _normal(0.25))
    yield "norm.weight", _norm(d)
    yield from _stream_head_specs(config, "")


def _stream_head_specs(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    n, d = config["hc_mult"], config["hidden_size"]
    yield f"{prefix}hc_head_fn", _float32((n, n * d), (n * d) ** -0.5)
    yield f"{prefix}hc_head_base", _float32((n,), 0.2, _PRE_BIAS)
    yield f"{prefix}hc_head_scale", _float32((1,), 0.02, _MIX_SCALE)


def _block_specs(
    config: dict[str, Any], prefix: str, ratio: int, is_hashed: bool
) -> Iterator[tuple[str, TensorSpec]]:
    n, d = config["hc_mult"], config["hidden_size"]
    for part in ("attn", "ffn"):
        mix = TensorSpec(((2 + n) * n,), "F32", _mix_base(n))
        yield f"{prefix}hc_{part}_fn", _float32(((2 + n) * n, n * d), (n * d) ** -0.5)
        yield f"{prefix}hc_{part}_base", mix
        yield f"{prefix}hc_{part}_scale", _float32((3,), 0.02, _MIX_SCALE)
        yield f"{prefix}{part}_norm.weight", _norm(d)
    yield from _attention_specs(config, f"{prefix}attn.", ratio)
    yield from _moe_specs(config, f"{prefix}ffn.", is_hashed)


def _attention_specs(
    config: dict[str, Any], prefix: str, ratio: int
) -> Iterator[tuple[str, TensorSpec]]:
    d, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q, groups, rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    yield f"{prefix}wq_a.weight", _linear(q, d)
    yield f"{prefix}q_norm.weight", _norm(q)
    yield f"{prefix}wq_b.weight", _linear(heads * head_dim, q)
    yield f"{prefix}wkv.weight", _linear(head_dim, d)
    yield f"{prefix}kv_norm.weight", _norm(head_dim)
    yield f"{prefix}attn_sink", _float32((heads,), 1.0)
    yield f"{prefix}wo_a.weight", _linear(groups * rank, heads * head_dim // groups)
    yield f"{prefix}wo_b.weight", _linear(d, groups * rank)
    if ratio:
        yield from _compressor_specs(d, f"{prefix}compressor.", ratio, head_dim)
    if ratio == 4:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        yield f"{prefix}indexer.wq_b.weight", _linear(index_heads * index_dim, q)
        yield f"{prefix}indexer.weights_proj.weight", _linear(index_heads, d)
        yield from _compressor_specs(d, f"{prefix}indexer.compressor.", ratio, index_dim)


def _compressor_specs(
    d: int, prefix: str, ratio: int, head_dim: int
) -> Iterator[tuple[str, TensorSpec]]:
    width = 2 * head_dim if ratio == 4 else head_dim  # ratio 4 overlaps: two halves per row
    yield f"{prefix}ape", _float32((ratio, width), 0.5)
    yield f"{prefix}wkv.weight", _linear(width, d)
    yield f"{prefix}wgate.weight", _linear(width, d)
    yield f"{prefix}norm.weight", _norm(head_dim)


def _moe_specs(
    config: dict[str, Any], prefix: str, is_hashed: bool
) -> Iterator[tuple[str, TensorSpec]]:
    d, inter = config["hidden_size"], config["moe_intermediate_size"]
    num_experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    yield f"{prefix}gate.weight", _linear(num_experts, d)
    if is_hashed:
        table = _hash_table(num_experts, top_k)
        yield f"{prefix}gate.tid2eid", TensorSpec((config["vocab_size"], top_k), "I64", table)
    else:
        yield f"{prefix}gate.bias", _float32((num_experts,), 0.1)
    experts = [f"experts.{e}" for e in range(num_experts)]
    shared = inter * config["n_shared_experts"]
    for expert, width in [*((e, inter) for e in experts), ("shared_experts", shared)]:
        yield f"{prefix}{expert}.w1.weight", _linear(width, d)
        yield f"{prefix}{expert}.w3.weight", _linear(width, d)
        yield f"{prefix}{expert}.w2.weight", _linear(d, width)


def _mtp_specs(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    d = config["hidden_size"]
    yield from _block_specs(config, prefix, ratio=0, is_hashed=False)
    yield f"{prefix}e_proj.weight", _linear(d, d)
    yield f"{prefix}h_proj.weight", _linear(d, d)
    for norm in ("enorm", "hnorm", "norm"):
        yield f"{prefix}{norm}.weight", _norm(d)
    yield from _stream_head_specs(config, prefix)


def main() -> None:
    """Write the checkpoint into the folder given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    if not CORPUS.is_file():
        parser.error(f"{CORPUS} is missing: it is part of the source tree, not of an installation")
    make_checkpoint(arguments.out)


if __name__ == "__main__":
    main()
