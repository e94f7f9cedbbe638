"""Phi 3, 3.5 and 4: like Llama, with fused projections and, for long contexts, divided frequencies.

The list of divisors goes by the context: ``max_position_embeddings`` at or below the first length
means the short one. Source: arXiv:2404.14219 and the releases' config.json.
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
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    read_activation,
    read_head_dim,
    read_length,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import read_rope


def read_phi3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Phi3ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "phi3", ("phi3",))
    fields.require("attention_bias", False, (False,))
    refuse_quantization(fields)
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    head_dim = read_head_dim(fields, num_heads)
    rope = read_rope(fields, head_dim, 10_000.0, default_share=1.0)
    window = fields.positive_int("sliding_window") if fields.has("sliding_window") else 0
    inner = fields.positive_int("intermediate_size")
    plan = LayerPlan(window, rope, MlpPlan(inner, read_activation(fields)))
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=(plan,) * fields.positive_int("num_hidden_layers"),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-5)),
        has_head=not fields.boolean("tie_word_embeddings", False),
        names=_find_names(num_heads * head_dim, num_kv_heads * head_dim, inner),
    ).check()


def _find_names(num_queries: int, num_keys: int, inner: int) -> TensorNames:
    """Returns the rows of fused projections."""
    part = "self_attn."
    projections = tuple(
        (f"{part}{name}_proj.", rows)
        for name, rows in (("q", num_queries), ("k", num_keys), ("v", num_keys))
    )
    return TensorNames(
        fused=(
            (f"{part}qkv_proj.", projections),
            ("mlp.gate_up_proj.", (("mlp.gate_proj.", inner), ("mlp.up_proj.", inner))),
        )
    )
