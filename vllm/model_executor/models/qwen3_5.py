"""Qwen 3.5: three recurrent layers by the gated delta rule to one of gated attention.

Attention's output is multiplied by the sigmoid of a gate that is projected with the queries; a
quarter of a head is turned; norms of layers, queries and keys store their weights less one, the
gated norm inside recurrent layers does not. Source: arXiv:2412.06464 for the recurrence, the
releases' config.json for the rest.

``Qwen3_5ForConditionalGeneration`` is served as its text part: with text alone its positions on
three axes are equal, which is plain rotary embedding.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    GatedDeltaPlan,
    LayerPlan,
    MlpPlan,
    NormPlan,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    read_activation,
    read_head_dim,
    read_layer_types,
    read_length,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import RopeConfig, read_rope

_KINDS = ("linear_attention", "full_attention")
_THETA = 10_000.0
_TURNED_SHARE = 0.25
# The block that drafts tokens is not run.
_DRAFTER = "mtp."
_TEXT_ONLY = TensorNames(ignored=(_DRAFTER,))
_WITH_VISION = TensorNames(
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.visual.", "visual."),
    ),
    ignored=("visual.", _DRAFTER),
)


def read_qwen3_5(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen3_5ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "qwen3_5_text", ("qwen3_5_text",))
    refuse_quantization(fields)
    return _read_dense(fields, _TEXT_ONLY, fields.boolean("tie_word_embeddings", False))


def read_qwen3_5_with_vision(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a Qwen3_5ForConditionalGeneration; raises as ``read_qwen3_5``."""
    fields = FieldReader(raw)
    fields.require("model_type", "qwen3_5", ("qwen3_5",))
    refuse_quantization(fields)
    text = fields.sub_reader("text_config")
    is_tied = fields.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", False))
    return _read_dense(text, _WITH_VISION, is_tied)


def _read_dense(fields: FieldReader, names: TensorNames, is_tied: bool) -> DecoderConfig:
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields, num_heads)
    rope = _read_rope(fields, head_dim)
    recurrence = read_gated_delta(fields)
    mlp = MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields))
    has_bias = fields.boolean("attention_bias", False)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields),
        layers=tuple(
            LayerPlan(0, rope, mlp)
            if kind == "full_attention"
            else LayerPlan(0, None, mlp, recurrence=recurrence)
            for kind in read_kinds(fields)
        ),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_qk_norm=True,
            has_output_gate=True,
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6), has_offset=True),
        has_head=not is_tied,
        names=names,
    ).check()


def read_kinds(fields: FieldReader) -> list[str]:
    """Reads which layers are recurrent; unset, all but every fourth (or so many).

    Raises:
        ConfigError: Another kind of layer.
    """
    interval = fields.positive_int("full_attention_interval", 4)
    count = fields.positive_int("num_hidden_layers")
    default = [_KINDS[(index + 1) % interval == 0] for index in range(count)]
    return read_layer_types(fields, default, _KINDS)


def read_gated_delta(fields: FieldReader, *, is_interleaved: bool = False) -> GatedDeltaPlan:
    """Reads the shape of recurrent layers.

    Raises:
        ConfigError: A field is wrong, or of no kind that is served.
    """
    activation = fields.text("output_gate_type", "swish")
    if activation not in ("swish", "silu", "sigmoid"):
        raise fields.error("output_gate_type", activation, "swish, silu or sigmoid")
    return GatedDeltaPlan(
        num_key_heads=fields.positive_int("linear_num_key_heads", 16),
        num_value_heads=fields.positive_int("linear_num_value_heads", 32),
        key_dim=fields.positive_int("linear_key_head_dim", 128),
        value_dim=fields.positive_int("linear_value_head_dim", 128),
        conv_width=fields.positive_int("linear_conv_kernel_dim", 4),
        is_interleaved=is_interleaved,
        gate_activation="sigmoid" if activation == "sigmoid" else "silu",
    )


def _read_rope(fields: FieldReader, head_dim: int) -> RopeConfig:
    rope = read_rope(fields, head_dim, _THETA, default_share=_TURNED_SHARE)
    nested = fields.sub_reader(
        "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    )
    sections = nested.int_list("mrope_section")
    if sections and 2 * sum(sections) != rope.dim:
        raise nested.error(
            "mrope_section", list(sections), f"numbers of pairs that sum up to {rope.dim // 2}"
        )
    return rope
