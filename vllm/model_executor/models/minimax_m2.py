"""MiniMax M2: queries and keys normed over all heads together, experts scored by sigmoids.

A part of a head is turned; there is no shared expert and no dense layer. Source: the releases'
config.json.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    MTP,
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
    LayerPlan,
    NormPlan,
    SigmoidRouter,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    read_activation,
    read_head_dim,
    read_layer_types,
    read_length,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import read_rope

_NAMES = TensorNames(
    ignored=(MTP,),
    spellings=(
        (r"\.block_sparse_moe\.", ".mlp."),
        # transformers 5 spells the part as others do, but for this.
        (r"\.mlp\.e_score_", ".mlp.gate.e_score_"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
    ),
)


def read_minimax_m2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a MiniMaxM2ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "minimax_m2", ("minimax_m2", "minimax"))
    fields.require("scoring_func", "sigmoid", ("sigmoid",))
    fields.require("use_qk_norm", True, (True,))
    fields.require("qk_norm_type", "per_layer", ("per_layer",))
    fields.require("shared_intermediate_size", 0, (0,))
    refuse_quantization(fields)
    num_layers = fields.positive_int("num_hidden_layers")
    kinds = fields.int_list("attn_type_list")
    if any(kind != 1 for kind in kinds):
        raise fields.error("attn_type_list", kinds, "1, full attention, in every layer")
    read_layer_types(fields, ["full_attention"] * num_layers, ("full_attention",))
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields, num_heads)
    share = fields.positive_int("rotary_dim", head_dim) / head_dim
    rope = read_rope(fields, head_dim, 10_000.0, default_share=share)
    experts = ExpertsPlan(
        num_experts=fields.positive_int("num_local_experts"),
        num_chosen=fields.positive_int("num_experts_per_tok"),
        inner_size=fields.positive_int("intermediate_size"),
        normalises=True,
        activation=read_activation(fields),
        router=SigmoidRouter(1, 1, 1.0),
    )
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=(LayerPlan(0, rope, experts),) * num_layers,
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            norms_whole_rows=True,
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6)),
        has_head=not fields.boolean("tie_word_embeddings", False),
        names=_NAMES,
    ).check()
