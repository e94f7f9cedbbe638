"""Llama 2 and 3, SmolLM2, Mistral: grouped queries, silu MLPs, norms before each part.

Mistral adds a window to every layer (7B v0.1; later releases have none), or to those that its
``layer_types`` name. Llama 3.1 adds its own stretch of the rotary frequencies. Sources:
arXiv:2302.13971, arXiv:2310.06825, arXiv:2407.21783.
"""

from collections.abc import Mapping, Sequence
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
    read_layer_types,
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
