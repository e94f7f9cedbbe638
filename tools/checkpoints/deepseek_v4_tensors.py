"""The embedded checkpoint's tensors: every published name with its shape, type and distribution.

The distributions give an untrained model that behaves: streams and logits of sane scale, attention
sinks, position biases and hyper-connections that all take part.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Init = Callable[[np.random.RandomState, tuple[int, ...]], Array]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the checkpoint: its shape, its safetensors dtype and how it is drawn."""

    shape: tuple[int, ...]
    dtype: str
    init: Init


_PRE_BIAS = -1.1  # sigmoid(-1.1) = 0.25 = 1 / hc_mult
_MIX_SCALE = 0.3  # how far the streams themselves sway their mixing


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
    return TensorSpec((out_features, in_features), "BF16", _normal(1.0 / math.sqrt(in_features)))


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


def _model_level_specs(config: dict[str, Any]) -> Iterator[tuple[str, TensorSpec]]:
    d, vocab = config["hidden_size"], config["vocab_size"]
    yield "embed.weight", TensorSpec((vocab, d), "BF16", _normal(1.0))
    # Logits of deviation 2.8: neither flat nor frozen.
    yield "head.weight", TensorSpec((vocab, d), "BF16", _normal(0.25))
    yield "norm.weight", _norm(d)
    yield from _stream_head_specs(config, "")


def _stream_head_specs(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, TensorSpec]]:
    n, d = config["hc_mult"], config["hidden_size"]
    yield f"{prefix}hc_head_fn", _float32((n, n * d), 1.0 / math.sqrt(n * d))
    yield f"{prefix}hc_head_base", _float32((n,), 0.2, _PRE_BIAS)
    yield f"{prefix}hc_head_scale", _float32((1,), 0.02, _MIX_SCALE)


def _block_specs(
    config: dict[str, Any], prefix: str, ratio: int, is_hashed: bool
) -> Iterator[tuple[str, TensorSpec]]:
    n, d = config["hc_mult"], config["hidden_size"]
    for part in ("attn", "ffn"):
        mix = TensorSpec(((2 + n) * n,), "F32", _mix_base(n))
        yield f"{prefix}hc_{part}_fn", _float32(((2 + n) * n, n * d), 1.0 / math.sqrt(n * d))
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
