"""What a rank holds of a decoder (torch-free).

by token id           embedding, output head
by head               queries, o-projection, sinks; keys and values where there are enough
                      heads of them, else several ranks hold the same one
by inner width        gated MLPs, and experts unless they are dealt out whole
whole on every rank   norms, routers, biases that are added to a sum over the ranks
"""

import re

from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.shards import RankShare, Shard, refuse_uneven_axes
from vllm.model_executor.models.decoder.config import (
    MXFP4_GROUP_SIZE,
    AttentionShape,
    ClampedExpertsPlan,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
    MlpPlan,
)

_BY_ROW = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|.+\.self_attn\.(q_proj\..+|sinks)"
    r"|.+\.mlp\.(gate|up)_proj\..+"
)
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")
_BY_COLUMN = re.compile(r".+\.(self_attn\.o_proj|mlp\.down_proj)\.(?!bias).+")
_KEYS_OR_VALUES = re.compile(r".+\.self_attn\.[kv]_proj\..+")
_EXPERT = re.compile(r".+\.(?:mlp\.)?experts\.(\d+)\.(gate|up|down)_proj\.weight")
# All experts of a layer in one tensor [E, ...], as gpt-oss has them.
_STACK = re.compile(r".+\.mlp\.experts\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
# Which axis of a stack runs over an expert's inner width; None: it has none.
_INNER_AXIS: dict[tuple[str, str], int | None] = {
    ("gate_up", ""): 2,
    ("gate_up", "_bias"): 1,
    ("gate_up", "_blocks"): 1,
    ("gate_up", "_scales"): 1,
    ("down", ""): 1,
    ("down", "_bias"): None,
    ("down", "_blocks"): 2,
    ("down", "_scales"): 2,
}


def find_shard(config: DecoderConfig, share: RankShare, name: str) -> Shard | None:
    """Return which part of a published tensor a rank holds."""
    if _BY_ROW.fullmatch(name):
        return share.of_axis(0)
    if _BY_COLUMN.fullmatch(name):
        return share.of_axis(1)
    if _KEYS_OR_VALUES.fullmatch(name):
        count = min(share.size, _find_shape(config, name).num_kv_heads)
        return Shard(0, share.rank * count // share.size, count) if count > 1 else None
    if (match := _EXPERT.fullmatch(name)) is not None:
        if not share.spreads_experts:
            return share.of_axis(int(match[2] == "down"))
        return share.of_expert(int(match[1]), _count_experts(config))
    if (match := _STACK.fullmatch(name)) is not None:
        if share.spreads_experts:
            return share.of_axis(0)
        axis = _INNER_AXIS[match[1], match[2]]
        return None if axis is None else share.of_axis(axis)
    return None


def cut_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return a config whose caches are those of one of ``size`` ranks."""
    return config.for_ranks(size)


def check_ranks(config: DecoderConfig, size: int, spreads_experts: bool) -> None:
    """Refuse a number of ranks that the model's axes cannot be shared out to.

    Raises:
        ConfigError: It does not divide one, or experts are to be dealt out that there are not; the
            message names the axis and its size.
    """
    if size > 1 and config.recurrences:
        raise ConfigError(
            f"tensor_parallel_size={size} is not supported for models with recurrent layers: use 1."
        )
    axes = {"vocab_size": config.vocab_size}
    for layer in config.layers:
        shape = config.shape_of(layer)
        axes["num_attention_heads"] = shape.num_heads
        if shape.num_kv_heads % size and size % shape.num_kv_heads:
            axes["num_key_value_heads"] = shape.num_kv_heads
        for plan in (layer.feed_forward, layer.experts):
            axes |= _find_axes(plan, spreads_experts=spreads_experts)
    refuse_uneven_axes(axes, size)
    if spreads_experts and not _count_experts(config):
        raise ConfigError("--enable-expert-parallel needs a model with experts: leave it out.")


def _find_axes(plan: FeedForwardPlan | None, *, spreads_experts: bool) -> dict[str, int]:
    """Return the axes of a feed-forward part that are shared out, and their sizes."""
    if plan is None:
        return {}
    if isinstance(plan, MlpPlan):
        return {"intermediate_size": plan.inner_size}
    if spreads_experts:
        return {"number of experts": plan.num_experts}
    if isinstance(plan, ClampedExpertsPlan) and plan.is_mxfp4:
        axis = "groups of 32 values under an MXFP4 scale (of intermediate_size)"
        return {axis: plan.inner_size // MXFP4_GROUP_SIZE}
    return {"width of an expert": plan.inner_size}


def _find_shape(config: DecoderConfig, name: str) -> AttentionShape:
    match = _LAYER.fullmatch(name)
    return config.attention if match is None else config.shape_of(config.layers[int(match[1])])


def _count_experts(config: DecoderConfig) -> int:
    plans = (plan for layer in config.layers for plan in (layer.feed_forward, layer.experts))
    counts = [p.num_experts for p in plans if isinstance(p, ExpertsPlan | ClampedExpertsPlan)]
    return max(counts, default=0)
