"""Llama 2 and 3, SmolLM2, Mistral, Ministral 3: grouped queries, silu MLPs, norms before each part.

Mistral adds a window to every layer (7B v0.1; later releases have none), or to those that its
``layer_types`` name. Ministral 3 and Devstral 2 scale queries by their position; the wrapper
``Mistral3ForConditionalGeneration`` is served as its text part. Llama 3.1 adds its own stretch of
the rotary frequencies. Sources: arXiv:2302.13971, arXiv:2310.06825, arXiv:2407.21783.
"""

from collections.abc import Mapping, Sequence
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
    read_activation,
    read_head_dim,
    read_layer_types,
    read_length,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import (
    find_original_length,
    find_rope_object,
    read_rope,
)

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


def read_llama(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a LlamaForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "llama", ("llama",))
    has_bias = fields.boolean("attention_bias", False)
    windows = [0] * fields.positive_int("num_hidden_layers")
    return _read(fields, windows, has_bias=has_bias, has_mlp_bias=fields.boolean("mlp_bias", False))


def read_mistral(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a MistralForCausalLM; raises as ``read_llama``.

    transformers 5 calls it Ministral where it has ``layer_types``.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "mistral", ("mistral", "ministral"))
    window = 0
    # Absent means the default of the first release, null that there is none.
    if raw.get("sliding_window", 4096) is not None:
        window = fields.positive_int("sliding_window", 4096)
    default = "sliding_attention" if window else "full_attention"
    kinds = read_layer_types(fields, [default] * fields.positive_int("num_hidden_layers"))
    if not window and "sliding_attention" in kinds:
        raise fields.error("layer_types", "sliding_attention", "full_attention: no window is set")
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    return _read(fields, windows, has_bias=False, has_mlp_bias=False)


def read_ministral3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Ministral3ForCausalLM; raises as ``read_llama``."""
    fields = FieldReader(raw)
    refuse_quantization(fields)
    return _read_ministral3(fields, TensorNames())


def read_mistral3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a Mistral3ForConditionalGeneration; raises as ``read_llama``."""
    fields = FieldReader(raw)
    fields.require("model_type", "mistral3", ("mistral3",))
    refuse_quantization(fields)
    text = fields.sub_reader("text_config")
    image = fields.non_negative_int("image_token_index", 10)
    if text.text("model_type", "mistral") == "ministral3":
        return _read_ministral3(text, _WITH_VISION, (image,))
    nested = {"model_type": "mistral", "sliding_window": None, **raw.get("text_config", {})}
    return replace(read_mistral(nested), names=_WITH_VISION, placeholder_ids=(image,))


def _read_ministral3(
    fields: FieldReader, names: TensorNames, placeholder_ids: tuple[int, ...] = ()
) -> DecoderConfig:
    fields.require("model_type", "ministral3", ("ministral3",))
    # No release has one, and of two kinds of layers the rotary settings would not be the same.
    fields.require("sliding_window", None, (None,))
    rope = find_rope_object(fields)
    beta = rope.non_negative_number("llama_4_scaling_beta", 0.0)
    windows = [0] * fields.positive_int("num_hidden_layers")
    config = _read(fields, windows, has_bias=False, has_mlp_bias=False)
    attention = config.attention
    if beta:
        length = find_original_length(rope, fields)
        if not length:
            raise rope.error("original_max_position_embeddings", None, "a number of tokens")
        attention = replace(attention, position_beta=beta, position_length=length)
    return replace(config, attention=attention, names=names, placeholder_ids=placeholder_ids)


def _read(
    fields: FieldReader, windows: Sequence[int], *, has_bias: bool, has_mlp_bias: bool
) -> DecoderConfig:
    refuse_quantization(fields)
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields, num_heads)
    rope = read_rope(fields, head_dim, theta=10_000.0)
    mlp = MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields), has_mlp_bias)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=tuple(LayerPlan(window, rope, mlp) for window in windows),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6)),
        has_head=not fields.boolean("tie_word_embeddings", False),
    ).check()
