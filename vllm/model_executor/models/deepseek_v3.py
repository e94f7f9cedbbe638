"""DeepSeek V2 and V3, R1, Kimi K2: latent attention with positions, experts in groups, dense first.

V3 scores experts by sigmoids and chooses with a bias, V2 by a softmax. Shared parts of keys and
queries are turned as pairs of neighbours. A layer behind the last one drafts. Sources:
arXiv:2405.04434, arXiv:2412.19437 and the releases' config.json.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
    LatentShape,
    LayerPlan,
    MlpPlan,
    NormPlan,
)
from vllm.model_executor.models.decoder.family_fields import (
    DENSE,
    SPARSE,
    read_activation,
    read_length,
    read_mlp_types,
    read_scored_experts,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import (
    RopeConfig,
    find_rope_object,
    read_rope,
)
from vllm.model_executor.models.glm4_moe import drafting_names, find_drafter

# The releases' code has it, not config.json.
_LATENT_EPS = 1e-6


def read_deepseek_v3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a DeepseekV3ForCausalLM: V3, R1, Kimi K2, GLM 4.7 Flash.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    kinds = ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
    fields.require("model_type", "deepseek_v3", kinds)
    return read_scored_latents(fields)


def read_deepseek_v2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a DeepseekV2ForCausalLM; raises as ``read_deepseek_v3``."""
    fields = FieldReader(raw)
    fields.require("model_type", "deepseek_v2", ("deepseek_v2",))
    fields.require("scoring_func", "softmax", ("softmax",))
    return _read(fields, lambda: _read_softmax_experts(fields), num_dense=0)


def read_scored_latents(fields: FieldReader) -> DecoderConfig:
    """Reads layers as V3's of a config.json of any type; raises as ``read_deepseek_v3``."""
    fields.require("scoring_func", "sigmoid", ("sigmoid",))
    fields.require("topk_method", "noaux_tc", ("noaux_tc",))
    fields.require("rope_interleave", True, (True,))
    return _read(fields, lambda: read_scored_experts(fields), num_dense=3)


def _read(fields: FieldReader, read_experts: Any, num_dense: int) -> DecoderConfig:
    refuse_quantization(fields)
    fields.require("attention_bias", False, (False,))
    fields.require("mlp_bias", False, (False,))
    fields.require("moe_layer_freq", 1, (1,))
    width = fields.positive_int("qk_rope_head_dim", 64)
    rope = read_rope(fields, width, 10_000.0)
    mlp = MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields))
    halves: dict[str, FeedForwardPlan] = {DENSE: mlp}
    half_names = read_mlp_types(fields, num_dense)
    if SPARSE in half_names:
        halves[SPARSE] = read_experts()
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=tuple(LayerPlan(0, rope, halves[half]) for half in half_names),
        attention=_read_attention(fields, rope),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6)),
        has_head=not fields.boolean("tie_word_embeddings", False),
        names=drafting_names(len(half_names)),
        drafter=find_drafter(fields, rope, halves),
        drafter_skips_first=True,
    ).check()


def _read_attention(fields: FieldReader, rope: RopeConfig) -> AttentionShape:
    latent = LatentShape(
        latent_dim=fields.positive_int("kv_lora_rank", 512),
        shared_dim=rope.dim,
        key_dim=fields.positive_int("qk_nope_head_dim", 128),
        value_dim=fields.positive_int("v_head_dim", 128),
        eps=_LATENT_EPS,
        query_rank=fields.positive_int("q_lora_rank") if fields.has("q_lora_rank") else 0,
    )
    if latent.row_width % 2:
        raise fields.error("kv_lora_rank", latent.latent_dim, "an even number")
    return AttentionShape(
        num_heads=fields.positive_int("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.row_width,
        scale=(latent.key_dim + latent.shared_dim) ** -0.5 * _read_magnitude(fields, rope) ** 2,
        latent=latent,
    )


def _read_magnitude(fields: FieldReader, rope: RopeConfig) -> float:
    """Returns what YaRN multiplies queries and keys by, both, in the scores alone."""
    scaling = find_rope_object(fields)
    share = scaling.non_negative_number("mscale_all_dim", 0.0)
    if rope.kind != "yarn" or rope.factor <= 1 or not share:
        return 1.0
    return 0.1 * share * math.log(rope.factor) + 1.0


def _read_softmax_experts(fields: FieldReader) -> ExpertsPlan:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    plan = read_scored_experts(
        fields if method != "greedy" else fields.without("n_group", "topk_group")
    )
    assert plan.router is not None, "experts have scores of their own"
    router = replace(plan.router, is_softmax=True)
    normalises = fields.boolean("norm_topk_prob", False)
    return replace(plan, router=router, normalises=normalises)
