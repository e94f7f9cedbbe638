"""What a rank holds of a DeepSeek-V4 (torch-free).

    by token id           embedding, output head
    by head               query matrix wq_b, sinks; by group of heads the o-projection wo_a, wo_b
    by inner width        the shared expert, and the routed ones unless they are dealt out whole
    whole on every rank   all else: latent projections, compressors, indexer, router, norms

All caches are whole on every rank too: a token's latent row serves every head.
"""

import re

from vllm.model_executor.model_loader.shards import RankShare, Shard, refuse_uneven_axes
from vllm.model_executor.models.deepseek_v4.config import LatentConfig

_BY_ROW = re.compile(r"(embed|head)\.weight|.+\.attn\.((wq_b|wo_a)\..+|attn_sink)")
_BY_COLUMN = re.compile(r".+\.attn\.wo_b\..+")
_EXPERT = re.compile(r".+\.ffn\.(?:experts\.(\d+)|shared_experts)\.(w[123])\.(.+)")
# One value per output: of a matrix cut by inputs, whole on every rank.
_PER_OUTPUT = ("weight_scale", "weight_offset")
_DOWN = "w2"


def find_shard(config: LatentConfig, share: RankShare, name: str) -> Shard | None:
    """Return which part of a published tensor a rank holds."""
    if _BY_ROW.fullmatch(name):
        return share.of_axis(0)
    if _BY_COLUMN.fullmatch(name):
        return None if name.endswith(_PER_OUTPUT) else share.of_axis(1)
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    expert, matrix, leaf = match.groups()
    shard = share.of_axis(int(matrix == _DOWN))
    if matrix == _DOWN and leaf in _PER_OUTPUT:
        shard = None
    if expert is None or not share.spreads_experts:
        return shard
    return share.of_expert(int(expert), config.n_routed_experts)


def cut_config(config: LatentConfig, size: int) -> LatentConfig:
    """Return the config itself: caches are whole on every rank."""
    del size
    return config


def check_ranks(config: LatentConfig, size: int, spreads_experts: bool) -> None:
    """Refuse a number of ranks that the model's axes cannot be shared out to.

    Raises:
        ConfigError: It does not divide one; the message names it and its size.
    """
    axes = {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "vocab_size": config.vocab_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    if spreads_experts:
        axes["n_routed_experts"] = config.n_routed_experts
    refuse_uneven_axes(axes, size)
