"""Llama 2 and 3, SmolLM2, Mistral: grouped queries, silu MLPs, norms before each part.

Mistral adds a window to every layer (7B v0.1; later releases have none), Llama 3.1 its own stretch
of the rotary frequencies. Sources: arXiv:2302.13971, arXiv:2310.06825, arXiv:2407.21783.
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
    read_head_dim,
    read_length,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import read_rope


def read_llama(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a LlamaForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "llama", ("llama",))
    has_bias = fields.boolean("attention_bias", False)
    return _read(
        fields, window=0, has_bias=has_bias, has_mlp_bias=fields.boolean("mlp_bias", False)
    )


def read_mistral(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a MistralForCausalLM; raises as ``read_llama``."""
    fields = FieldReader(raw)
    fields.require("model_type", "mistral", ("mistral",))
    window = 0
    # Absent means the default of the first release, null that there is none.
    if raw.get("sliding_window", 4096) is not None:
        window = fields.positive_int("sliding_window", 4096)
    return _read(fields, window=window, has_bias=False, has_mlp_bias=False)


def _read(fields: FieldReader, *, window: int, has_bias: bool, has_mlp_bias: bool) -> DecoderConfig:
    refuse_quantization(fields)
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields, num_heads)
    rope = read_rope(fields, head_dim, theta=10_000.0)
    mlp = MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields), has_mlp_bias)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=(LayerPlan(window, rope, mlp),) * fields.positive_int("num_hidden_layers"),
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
