"""LFM2: gated short convolutions, and in some layers attention whose queries and keys are normed.

Some releases have experts, scored by sigmoids, behind the first layers. Source: the releases'
config.json and arXiv:2511.23404.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
    LayerPlan,
    MlpPlan,
    NormPlan,
    ShortConvolutionPlan,
    SigmoidRouter,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    read_head_dim,
    read_layer_types,
    read_length,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import read_rope

_CONVOLUTION, _FULL = _KINDS = ("conv", "full_attention")
_NAMES = TensorNames(
    spellings=(
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\bembedding_norm\.", "norm."),
    ),
)


def read_lfm2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Lfm2ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "lfm2", ("lfm2",))
    return _read(fields, [MlpPlan(_read_width(fields))] * fields.positive_int("num_hidden_layers"))


def read_lfm2_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Lfm2MoeForCausalLM; raises as ``read_lfm2``."""
    fields = FieldReader(raw)
    fields.require("model_type", "lfm2_moe", ("lfm2_moe",))
    fields.require("use_expert_bias", True, (True,))
    count = fields.positive_int("num_hidden_layers")
    num_dense = fields.non_negative_int("num_dense_layers", 2)
    dense: FeedForwardPlan = MlpPlan(fields.positive_int("intermediate_size", 7168))
    experts = ExpertsPlan(
        num_experts=fields.positive_int("num_experts", 32),
        num_chosen=fields.positive_int("num_experts_per_tok", 4),
        inner_size=fields.positive_int("moe_intermediate_size", 1792),
        normalises=fields.boolean("norm_topk_prob", True),
        router=SigmoidRouter(1, 1, fields.number("routed_scaling_factor", 1.0)),
    )
    return _read(fields, [dense if index < num_dense else experts for index in range(count)])


def _read_width(fields: FieldReader) -> int:
    """Reads an MLP's width, of which older releases say what it is computed from."""
    width = fields.positive_int(
        "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size", 12_288
    )
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return width
    multiplier = fields.number("block_ffn_dim_multiplier", 1.0)
    multiple = fields.positive_int("block_multiple_of", 256)
    return -(-int(multiplier * (2 * width // 3)) // multiple) * multiple


def _read(fields: FieldReader, plans: list[FeedForwardPlan]) -> DecoderConfig:
    refuse_quantization(fields)
    fields.require("conv_bias", False, (False,))
    hidden, num_heads = (
        fields.positive_int("hidden_size"),
        fields.positive_int("num_attention_heads"),
    )
    head_dim = read_head_dim(fields, num_heads)
    rope = read_rope(fields, head_dim, theta=1_000_000.0)
    convolution = ShortConvolutionPlan(hidden, fields.positive_int("conv_L_cache", 3))
    # Both names occur, the older one in releases.
    tie = "tie_embedding" if fields.has("tie_embedding") else "tie_word_embeddings"
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=read_length(fields, rope),
        layers=tuple(
            LayerPlan(0, None, plan, recurrence=convolution)
            if kind == _CONVOLUTION
            else LayerPlan(0, rope, plan)
            for kind, plan in zip(_read_kinds(fields, len(plans)), plans, strict=True)
        ),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_qk_norm=True,
        ),
        norm=NormPlan(fields.number("norm_eps", 1e-5)),
        has_head=not fields.boolean(tie, True),
        names=_NAMES,
    ).check()


def _read_kinds(fields: FieldReader, count: int) -> list[str]:
    """Reads what each layer is.

    Raises:
        ConfigError: None is attention.
    """
    full = fields.int_list("full_attn_idxs") if fields.has("full_attn_idxs") else range(count)
    default = [_FULL if index in full else _CONVOLUTION for index in range(count)]
    kinds = read_layer_types(fields, default, _KINDS)
    if _FULL not in kinds:
        raise fields.error("layer_types", kinds, f"at least one layer of {_FULL}")
    return kinds
