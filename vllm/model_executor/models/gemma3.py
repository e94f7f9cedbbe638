"""Gemma 3: five layers with a window to one of full attention, each kind turned its own way.

Norms stand on both sides of each part, their weights stored less one; queries and keys are normed
per head; embeddings are scaled by the root of their width. Window layers turn by a small base, the
others by a large one, which releases beyond 1B stretch linearly. Source: arXiv:2503.19786.

``Gemma3ForConditionalGeneration`` is served as its text part; the vision tower is left out.
EmbeddingGemma's tokens see both ways (arXiv:2509.20354).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    LayerPlan,
    MlpPlan,
    NormPlan,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    LAYER_TYPES,
    read_activation,
    read_layer_types,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import (
    RopeConfig,
    check_one_spelling,
    read_rope_by_kind,
    read_rope_object,
    refuse_other_theta,
)
from vllm.model_executor.towers.config import read_gemma3_images

_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0
_TEXT_ONLY = TensorNames()
# Releases put the text part first, transformers 5 the model.
_WITH_VISION = TensorNames(
    prefixes=(
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    ignored=("vision_tower.", "multi_modal_projector."),
)


def read_gemma3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Gemma3ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "gemma3_text", ("gemma3_text",))
    refuse_quantization(fields)
    return _read_text(fields, _TEXT_ONLY, fields.boolean("tie_word_embeddings", True))


def read_gemma3_with_vision(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a Gemma3ForConditionalGeneration; raises as ``read_gemma3``."""
    fields = FieldReader(raw)
    fields.require("model_type", "gemma3", ("gemma3",))
    refuse_quantization(fields)
    text = fields.sub_reader("text_config")
    text.require("use_bidirectional_attention", False, (False,))
    is_tied = fields.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", True))
    config = _read_text(text, _WITH_VISION, is_tied)
    images = read_gemma3_images(fields, config.hidden_size)
    placeholders = () if images is None else (images.family.placeholder_id,)
    return replace(config, images=images, placeholder_ids=placeholders)


def _read_text(fields: FieldReader, names: TensorNames, is_tied: bool) -> DecoderConfig:
    # The releases leave fields out that have the first release's values.
    sees_both_ways = fields.boolean("use_bidirectional_attention", False)
    fields.require("attn_logit_softcapping", None, (None,))
    num_layers = fields.positive_int("num_hidden_layers", 26)
    pattern = fields.positive_int("sliding_window_pattern", 6)
    kinds = read_layer_types(
        fields,
        ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)],
    )
    window = fields.positive_int("sliding_window", 4096)
    if sees_both_ways:
        # As many tokens on either side; both stop one short of it.
        window = window // 2 + 1
    head_dim = fields.positive_int("head_dim", 256)
    local, full = _read_ropes(fields, head_dim)
    mlp = MlpPlan(
        fields.positive_int("intermediate_size", 9216),
        read_activation(fields, "hidden_activation")
        if fields.has("hidden_activation")
        else "gelu_tanh",
    )
    hidden_size = fields.positive_int("hidden_size", 2304)
    has_bias = fields.boolean("attention_bias", False)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size", 262_208),
        hidden_size=hidden_size,
        max_position_embeddings=fields.positive_int("max_position_embeddings", 131_072),
        layers=tuple(
            LayerPlan(window, local, mlp)
            if kind == "sliding_attention"
            else LayerPlan(0, full, mlp)
            for kind in kinds
        ),
        attention=AttentionShape(
            num_heads=fields.positive_int("num_attention_heads", 8),
            num_kv_heads=fields.positive_int("num_key_value_heads", 4),
            head_dim=head_dim,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_qk_norm=True,
        ),
        norm=NormPlan(
            fields.number("rms_norm_eps", 1e-6),
            # GGUF files store them with one added.
            has_offset=not fields.boolean("norm_weights_are_factors", False),
            is_sandwich=True,
        ),
        has_head=not is_tied,
        embedding_scale=hidden_size**0.5,
        final_soft_cap=fields.number("final_logit_softcapping")
        if fields.has("final_logit_softcapping")
        else 0.0,
        names=names,
        sees_both_ways=sees_both_ways,
    ).check()


def _read_ropes(fields: FieldReader, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Returns the settings of window layers and of the others."""
    if fields.has("rope_parameters"):
        nested = read_rope_by_kind(fields, LAYER_TYPES)
        local = nested.sub_reader("sliding_attention")
        full = nested.sub_reader("full_attention")
        check_one_spelling(fields, full)
    else:
        local, full = FieldReader({}), fields.sub_reader("rope_scaling")
        for kind in LAYER_TYPES:
            # An object for each kind of layer belongs in the newer spelling: here it goes unread.
            full.require(kind, None, (None,))
    local_theta = fields.number("rope_local_base_freq", _LOCAL_THETA)
    global_theta = fields.number("rope_theta", _GLOBAL_THETA)
    local_rope = read_rope_object(local, head_dim, local_theta, fields)
    refuse_other_theta(fields, "rope_local_base_freq", local_rope.theta)
    return local_rope, read_rope_object(full, head_dim, global_theta, fields)
