"""What a rank holds of a decoder (torch-free).

by token id           embedding, output head
by head               queries, o-projection, sinks; keys and values where there are enough
                      heads of them, else several ranks hold the same one; of recurrent layers
                      projections, convolutions, decays and states; of latent attention what
                      takes queries to the latents and values from them
by inner width        gated MLPs, and experts unless they are dealt out whole
whole on every rank   norms, routers, biases that are added to a sum over the ranks; latents and
                      the indexers that choose among them
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
    GatedDeltaPlan,
    LayerPlan,
    MlpPlan,
    ShortConvolutionPlan,
)

_BY_ROW = re.compile(
    r"model\.embed_tokens\.weight|lm_head\.weight|.+\.self_attn\.(q_proj\..+|sinks)"
    r"|.+\.(mlp|block_sparse_moe)\.(shared_experts?\.)?(gate|up)_proj\..+"
    r"|.+\.self_attn\.((q_b|kv_b|b|f_b|g_b)_proj\..+|[qkv]_conv1d\.weight|dt_bias)"
    r"|.+\.linear_attn\.(in_proj_.+|conv1d_[qkv]\.weight|A_log|dt_bias)"
)
_DECAY_RATES = re.compile(r".+\.self_attn\.A_log")
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")
_BY_COLUMN = re.compile(
    r".+\.(self_attn\.o_proj|linear_attn\.out_proj"
    r"|(mlp|block_sparse_moe)\.(shared_experts?\.)?down_proj)\.(?!bias).+"
)
_KEYS_OR_VALUES = re.compile(r".+\.self_attn\.[kv]_proj\..+")
_EXPERT = re.compile(
    r".+\.(?:mlp\.|block_sparse_moe\.)?experts\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight"
)
_DOWN = ("down_proj", "w2")
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
    if _DECAY_RATES.fullmatch(name):
        # [1, 1, H, 1] in Kimi's files, [H] in others.
        own = _find_recurrence(config, name)
        return share.of_axis(0 if own is not None and own.decay_bound else 2)
    if _KEYS_OR_VALUES.fullmatch(name):
        if _find_recurrence(config, name) is not None:
            return share.of_axis(0)
        count = min(share.size, _find_shape(config, name).num_kv_heads)
        return Shard(0, share.rank * count // share.size, count) if count > 1 else None
    if (match := _EXPERT.fullmatch(name)) is not None:
        if not share.spreads_experts:
            return share.of_axis(int(match[2] in _DOWN))
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
    axes = {"vocab_size": config.vocab_size}
    for own in config.recurrences[:1]:
        if isinstance(own, ShortConvolutionPlan):
            if size > 1:
                raise ConfigError(
                    f"--tensor-parallel-size {size}: this model's short convolutions are not "
                    "shared out to several workers: use 1."
                )
            continue
        axes["key heads of a recurrent layer"] = own.num_key_heads
    for layer in config.layers:
        shape = config.shape_of(layer)
        if shape.norms_whole_rows and size > 1:
            raise ConfigError(
                f"--tensor-parallel-size {size} gives each rank a part of the heads, and this "
                "model norms queries and keys over all heads together: use 1."
            )
        axes["num_attention_heads"] = shape.num_heads
        # All heads read the same latents.
        uneven = shape.num_kv_heads % size and size % shape.num_kv_heads
        if uneven and shape.latent is None:
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
    shared = plan.shared if isinstance(plan, ExpertsPlan) else None
    beside = {"width of a shared expert": shared.inner_size} if shared is not None else {}
    if spreads_experts:
        return {"number of experts": plan.num_experts, **beside}
    if isinstance(plan, ClampedExpertsPlan) and plan.is_mxfp4:
        axis = "groups of 32 values under an MXFP4 scale (of intermediate_size)"
        return {axis: plan.inner_size // MXFP4_GROUP_SIZE}
    return {"width of an expert": plan.inner_size, **beside}


def _find_layer(config: DecoderConfig, name: str) -> LayerPlan | None:
    """Return the layer of a tensor; None: of no layer, or of one that the config has not."""
    match = _LAYER.fullmatch(name)
    index = len(config.layers) if match is None else int(match[1])
    # Of a file of more layers than config.json says, the load names what has no place.
    return config.layers[index] if index < len(config.layers) else None


def _find_recurrence(config: DecoderConfig, name: str) -> GatedDeltaPlan | None:
    layer = _find_layer(config, name)
    plan = None if layer is None else layer.recurrence
    return plan if isinstance(plan, GatedDeltaPlan) else None


def _find_shape(config: DecoderConfig, name: str) -> AttentionShape:
    layer = _find_layer(config, name)
    return config.attention if layer is None else config.shape_of(layer)


def _count_experts(config: DecoderConfig) -> int:
    plans = (plan for layer in config.layers for plan in (layer.feed_forward, layer.experts))
    counts = [p.num_experts for p in plans if isinstance(p, ExpertsPlan | ClampedExpertsPlan)]
    return max(counts, default=0)
