"""Qwen 3.5 and Qwen3-Next: three recurrent layers by the gated delta rule to one of attention.

Attention's output is multiplied by the sigmoid of a gate that is projected with the queries; a
quarter of a head is turned; norms of layers, queries and keys store their weights less one, the
gated norm inside recurrent layers does not. Source: arXiv:2412.06464 for the recurrence, the
releases' config.json for the rest.

Wrappers with vision, ``Qwen3_5ForConditionalGeneration`` and its kin, turn by three positions: a
token's number, and in a picture its row and column. Of text all three are equal, which is plain
rotary embedding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    MTP,
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
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
from vllm.model_executor.models.decoder.rope_config import RopeConfig, find_rope_object, read_rope
from vllm.model_executor.towers.config import read_qwen3_5_images

_KINDS = ("linear_attention", "full_attention")
_THETA = 10_000.0
_TURNED_SHARE = 0.25
# Pairs that a token's number, its row and its column turn, where the file does not say.
_SECTIONS = (11, 11, 10)
_TEXT_ONLY = TensorNames(ignored=(MTP,))
_WITH_VISION = TensorNames(
    prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.visual.", "visual."),
    ),
    ignored=("visual.", MTP),
)


def read_qwen3_5(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen3_5ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    return _read_text(raw, "qwen3_5_text", _read_dense)


def read_qwen3_5_with_vision(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a Qwen3_5ForConditionalGeneration; raises as ``read_qwen3_5``."""
    return _read_wrapped(raw, "qwen3_5", _read_dense)


def read_qwen3_5_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen3_5MoeForCausalLM; raises as ``read_qwen3_5``."""
    return _read_text(raw, "qwen3_5_moe_text", _read_normalised_experts)


def read_qwen3_5_moe_with_vision(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a Qwen3_5MoeForConditionalGeneration; raises as ``read_qwen3_5``."""
    return _read_wrapped(raw, "qwen3_5_moe", _read_normalised_experts)


def read_qwen3_next(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen3NextForCausalLM; raises as ``read_qwen3_5``."""
    fields = FieldReader(raw)
    fields.require("model_type", "qwen3_next", ("qwen3_next",))
    refuse_quantization(fields)
    experts = _read_experts(fields)
    plans: list[FeedForwardPlan] = [experts] * fields.positive_int("num_hidden_layers")
    dense = fields.int_list("mlp_only_layers")
    step = fields.positive_int("decoder_sparse_step", 1)
    if dense or step > 1:
        mlp = _read_dense(fields)
        plans = [
            experts if i not in dense and (i + 1) % step == 0 else mlp for i in range(len(plans))
        ]
    is_tied = fields.boolean("tie_word_embeddings", False)
    # Its config.json has no word on the block; the releases have its tensors.
    # GGUF files have its projections apart, as Qwen 3.5's.
    by_head = not fields.boolean("projections_are_apart", False)
    return _read(fields, plans, _TEXT_ONLY, is_tied, is_interleaved=by_head, num_drafters=1)


_PlanReader = Callable[[FieldReader], FeedForwardPlan]


def _read_text(raw: Mapping[str, Any], model_type: str, read_plan: _PlanReader) -> DecoderConfig:
    fields = FieldReader(raw)
    fields.require("model_type", model_type, (model_type,))
    refuse_quantization(fields)
    plans = [read_plan(fields)] * fields.positive_int("num_hidden_layers")
    return _read(fields, plans, _TEXT_ONLY, fields.boolean("tie_word_embeddings", False))


def _read_wrapped(raw: Mapping[str, Any], model_type: str, read_plan: _PlanReader) -> DecoderConfig:
    fields = FieldReader(raw)
    fields.require("model_type", model_type, (model_type,))
    refuse_quantization(fields)
    text = fields.sub_reader("text_config")
    is_tied = fields.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", False))
    plans = [read_plan(text)] * text.positive_int("num_hidden_layers")
    config = _read(text, plans, _WITH_VISION, is_tied)
    images = read_qwen3_5_images(fields, config.hidden_size)
    if images is None:
        return config
    video = fields.non_negative_int("video_token_id", 248_057)
    return replace(config, images=images, placeholder_ids=(images.family.placeholder_id, video))


def _read_dense(fields: FieldReader) -> MlpPlan:
    return MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields))


def _read_normalised_experts(fields: FieldReader) -> ExpertsPlan:
    # Qwen 3.5 has no such field: where one says false, its author expects another sum.
    fields.require("norm_topk_prob", True, (True,))
    return _read_experts(fields)


def _read_experts(fields: FieldReader) -> ExpertsPlan:
    activation = read_activation(fields)
    return ExpertsPlan(
        num_experts=fields.positive_int("num_experts", 512),
        num_chosen=fields.positive_int("num_experts_per_tok", 10),
        inner_size=fields.positive_int("moe_intermediate_size", 512),
        normalises=fields.boolean("norm_topk_prob", True),
        activation=activation,
        shared=MlpPlan(fields.positive_int("shared_expert_intermediate_size", 512), activation),
    )


def _read(
    fields: FieldReader,
    plans: Sequence[FeedForwardPlan],
    names: TensorNames,
    is_tied: bool,
    *,
    is_interleaved: bool = False,
    num_drafters: int = 0,
) -> DecoderConfig:
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields, num_heads)
    rope = _read_rope(fields, head_dim)
    recurrence = read_gated_delta(fields, is_interleaved=is_interleaved)
    has_bias = fields.boolean("attention_bias", False)
    fields.require("attn_output_gate", True, (True,))
    num_drafters = fields.non_negative_int("mtp_num_hidden_layers", num_drafters)
    own_embedding = fields.boolean("mtp_use_dedicated_embeddings", False)
    drafter = LayerPlan(0, rope, plans[-1]) if num_drafters == 1 and not own_embedding else None
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=tuple(
            LayerPlan(0, rope, plan)
            if kind == "full_attention"
            else LayerPlan(0, None, plan, recurrence=recurrence)
            for kind, plan in zip(read_kinds(fields), plans, strict=True)
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
        norm=NormPlan(
            fields.number("rms_norm_eps", 1e-6),
            has_offset=not fields.boolean("norm_weights_are_factors", False),
        ),
        has_head=not is_tied,
        names=names,
        drafter=drafter,
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
    # Convolutions use it too, of which only this one is served.
    fields.require("hidden_act", "silu", ("silu", "swish"))
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
    nested = find_rope_object(fields)
    sections = nested.int_list("mrope_section")
    if sections and 2 * sum(sections) != rope.dim:
        raise nested.error(
            "mrope_section", list(sections), f"numbers of pairs that sum up to {rope.dim // 2}"
        )
    if sections and len(sections) != 3:
        raise nested.error("mrope_section", list(sections), "three numbers of pairs")
    nested.require("mrope_interleaved", True, (True,))
    if not sections and rope.dim == 2 * sum(_SECTIONS):
        sections = _SECTIONS
    return replace(rope, sections=sections)
