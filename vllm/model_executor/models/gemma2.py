"""Gemma 2: a window in every other layer, scores and logits capped by tanh.

Norms stand on both sides of each part, their weights stored less one; embeddings are scaled by the
root of their width. Source: arXiv:2408.00118.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    LayerPlan,
    MlpPlan,
    NormPlan,
)
from vllm.model_executor.models.decoder.family_fields import (
    read_activation,
    read_layer_types,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import read_rope

_LOCAL, _FULL = "sliding_attention", "full_attention"


def read_gemma2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Gemma2ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "gemma2", ("gemma2",))
    fields.require("use_bidirectional_attention", False, (False,))
    refuse_quantization(fields)
    num_layers = fields.positive_int("num_hidden_layers", 26)
    kinds = read_layer_types(fields, [_FULL if i % 2 else _LOCAL for i in range(num_layers)])
    window = fields.positive_int("sliding_window", 4096)
    head_dim = fields.positive_int("head_dim", 256)
    rope = read_rope(fields, head_dim, 10_000.0)
    # Old configs name the activation by the field that its release did not follow.
    has_name = fields.has("hidden_activation")
    activation = read_activation(fields, "hidden_activation") if has_name else "gelu_tanh"
    mlp = MlpPlan(fields.positive_int("intermediate_size", 9216), activation)
    hidden_size = fields.positive_int("hidden_size", 2304)
    has_bias = fields.boolean("attention_bias", False)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size", 256_000),
        hidden_size=hidden_size,
        max_position_embeddings=fields.positive_int("max_position_embeddings", 8192),
        layers=tuple(LayerPlan(window if kind == _LOCAL else 0, rope, mlp) for kind in kinds),
        attention=AttentionShape(
            num_heads=fields.positive_int("num_attention_heads", 8),
            num_kv_heads=fields.positive_int("num_key_value_heads", 4),
            head_dim=head_dim,
            scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            soft_cap=_read_cap(raw, "attn_logit_softcapping", 50.0),
        ),
        norm=NormPlan(
            fields.number("rms_norm_eps", 1e-6),
            # GGUF files store them with one added.
            has_offset=not fields.boolean("norm_weights_are_factors", False),
            is_sandwich=True,
        ),
        has_head=not fields.boolean("tie_word_embeddings", True),
        embedding_scale=hidden_size**0.5,
        final_soft_cap=_read_cap(raw, "final_logit_softcapping", 30.0),
    ).check()


def _read_cap(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Returns a cap; null means that there is none, which 0 stands for."""
    return 0.0 if raw.get(name, default) is None else FieldReader(raw).number(name, default)
