"""DeepSeek-V4's tensor names: the three spellings a checkpoint can use -> the published one.

    published        layers.0.attn.wq_a.weight
    module names     model.layers.0.self_attn.q_a_proj.weight     (transformers' state dict)
    saved            model.layers.0.attn.wq_a.weight              (transformers' save_pretrained)

No name means different things in two spellings, so each is translated by itself and a checkpoint
may mix them. Torch-free.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# A published name's segments never equal a left side below, save where the rule says which.
_TOP_LEVEL = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}
_BLOCK_PART = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attn",
    "mlp": "ffn",
}
_HYPER_CONNECTION = re.compile(r"(attn|ffn)_hc\.(fn|base|scale)")
# Within attn., longest first: the indexer moves out of the compressor.
_ATTENTION_PREFIX = {
    "compressor.indexer.q_b_proj": "indexer.wq_b",
    "compressor.indexer.scorer.weights_proj": "indexer.weights_proj",
    "compressor.indexer.": "indexer.compressor.",
}
_COMPRESSOR_LEAF = {
    "kv_proj": "wkv",
    "gate_proj": "wgate",
    "position_bias": "ape",
    "kv_norm": "norm",
}
_ATTENTION_LEAF = {
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "sinks": "attn_sink",
    # save_pretrained's slip: the norm of kv loses its prefix.
    "norm": "kv_norm",
}
_EXPERT_LEAF = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_BLOCK = re.compile(r"((?:layers|mtp)\.\d+\.)(.+)")
_INVERSE_SCALE = ".weight_scale_inv"
_STACKED = re.compile(r"(.+\.ffn\.experts\.)(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a stored tensor that is one published tensor.

    Attributes:
        name: The published name.
        expert: Which slice of the stored tensor's first dimension it is; None: the whole tensor.
        rows: ``(start, stop)`` within that slice's rows; None: all.
    """

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


def published_name(name: str) -> str:
    """Translate one tensor's name; a published one, or one of no spelling, comes back as it is.

    Stacked experts keep their ``experts.gate_up_proj`` leaf: see published_parts.
    """
    bare = name.removeprefix("model.")
    if bare.endswith(_INVERSE_SCALE):
        # The name of V3's releases; both multiply.
        bare = bare.removesuffix(_INVERSE_SCALE) + ".scale"
    if bare in _TOP_LEVEL:
        return _TOP_LEVEL[bare]
    match = _BLOCK.fullmatch(bare)
    return bare if match is None else match[1] + _block_name(match[2])


def published_parts(name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
    """Translate one stored tensor into the published tensors it holds.

    transformers stacks a layer's experts: ``gate_up_proj`` [E, 2M, D] holds w1 then w3, and
    ``down_proj`` [E, D, M] holds w2. A stack of another rank, or with an odd number of rows, is
    left whole under its own name, where the loader reports it.

    Args:
        name: The name in the file.
        shape: The shape in the file.
    """
    published = published_name(name)
    match = _STACKED.fullmatch(published)
    if match is None or len(shape) != 3:
        return (TensorPart(published),)
    prefix, leaf = match.groups()
    num_experts, num_rows, _ = shape
    if leaf == "down_proj":
        return tuple(TensorPart(f"{prefix}{e}.w2.weight", e) for e in range(num_experts))
    if num_rows % 2:
        return (TensorPart(published),)
    half = num_rows // 2
    return tuple(
        TensorPart(f"{prefix}{e}.{leaf_name}.weight", e, rows)
        for e in range(num_experts)
        for leaf_name, rows in (("w1", (0, half)), ("w3", (half, num_rows)))
    )


def _block_name(name: str) -> str:
    if match := _HYPER_CONNECTION.fullmatch(name):
        return f"hc_{match[1]}_{match[2]}"
    part, _, rest = name.partition(".")
    part = _BLOCK_PART.get(part, part)
    if not rest:
        return part
    if part == "attn":
        rest = _attention_name(rest)
    elif part == "ffn":
        rest = _ffn_name(rest)
    return f"{part}.{rest}"


def _attention_name(name: str) -> str:
    for old, new in _ATTENTION_PREFIX.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    for prefix in ("indexer.compressor.", "compressor."):
        if name.startswith(prefix):
            return prefix + _translate_first(name.removeprefix(prefix), _COMPRESSOR_LEAF)
    if name.startswith("indexer."):
        return name
    return _translate_first(name, _ATTENTION_LEAF)


def _ffn_name(name: str) -> str:
    if name == "gate.e_score_correction_bias":
        return "gate.bias"
    prefix = "shared_experts."
    if name.startswith(prefix):
        return prefix + _translate_first(name.removeprefix(prefix), _EXPERT_LEAF)
    return name


def _translate_first(name: str, table: dict[str, str]) -> str:
    """Translate the first segment of a dotted name."""
    first, dot, rest = name.partition(".")
    return table.get(first, first) + dot + rest
