"""gpt-oss: windows of 128 in every other layer, sinks in all, experts with biases in MXFP4.

Each head has a learned score that takes part in the softmax without a value. Experts gate by
(up + 1) * gate * sigmoid(1.702 * gate), clamped at 7. Rotary frequencies are stretched by YaRN with
a ramp that is not rounded. Source: arXiv:2508.10925 and the releases' config.json.
"""

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    MXFP4_GROUP_SIZE,
    AttentionShape,
    ClampedExpertsPlan,
    DecoderConfig,
    LayerPlan,
    NormPlan,
)
from vllm.model_executor.models.decoder.family_fields import read_layer_types
from vllm.model_executor.models.decoder.rope_config import RopeConfig, read_rope

_THETA = 150_000.0
# What the first release has, and an absent setting means.
_DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a GptOssForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in another way than MXFP4.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "gpt_oss", ("gpt_oss",))
    fields.require("hidden_act", "silu", ("silu",))
    num_layers = fields.positive_int("num_hidden_layers")
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = fields.positive_int("head_dim", 64)
    window = fields.positive_int("sliding_window", 128)
    kinds = read_layer_types(
        fields,
        ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
    )
    rope = _read_rope(fields, head_dim)
    experts = _read_experts(fields)
    has_bias = fields.boolean("attention_bias", True)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=fields.positive_int("max_position_embeddings", 131_072),
        layers=tuple(
            LayerPlan(window if kind == "sliding_attention" else 0, rope, experts) for kind in kinds
        ),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            has_sinks=True,
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-5)),
        has_head=not fields.boolean("tie_word_embeddings", False),
    ).check()


def _read_rope(fields: FieldReader, head_dim: int) -> RopeConfig:
    if fields.has("rope_parameters") or fields.has("rope_scaling"):
        return read_rope(fields, head_dim, _THETA)
    theta = fields.number("rope_theta", _THETA)
    return read_rope(
        FieldReader({"rope_theta": theta, "rope_scaling": _DEFAULT_ROPE}), head_dim, theta
    )


def _read_experts(fields: FieldReader) -> ClampedExpertsPlan:
    is_mxfp4 = _read_is_mxfp4(fields)
    inner_size = fields.positive_int("intermediate_size")
    hidden_size = fields.positive_int("hidden_size")
    if is_mxfp4 and (inner_size % MXFP4_GROUP_SIZE or hidden_size % MXFP4_GROUP_SIZE):
        raise ConfigError(
            f"hidden_size ({hidden_size}) and intermediate_size ({inner_size}) must be multiples "
            f"of {MXFP4_GROUP_SIZE}, the values under one MXFP4 scale"
        )
    return ClampedExpertsPlan(
        num_experts=fields.positive_int(
            "num_experts" if fields.has("num_experts") else "num_local_experts", 128
        ),
        num_chosen=_read_num_chosen(fields),
        inner_size=inner_size,
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.number("swiglu_limit", 7.0),
        is_mxfp4=is_mxfp4,
    )


def _read_num_chosen(fields: FieldReader) -> int:
    # Releases have both names.
    num_chosen = fields.positive_int("num_experts_per_tok", 4)
    other = fields.positive_int("experts_per_token", num_chosen)
    if fields.has("num_experts_per_tok") and other != num_chosen:
        allowed = f"{num_chosen}, which num_experts_per_tok says: give one of the two"
        raise fields.error("experts_per_token", other, allowed)
    return other


def _read_is_mxfp4(fields: FieldReader) -> bool:
    if not fields.has("quantization_config"):
        return False
    method = fields.sub_reader("quantization_config").text("quant_method", "unnamed")
    if method != "mxfp4":
        raise UnsupportedFeatureError(
            f"the checkpoint is quantised ({method}): gpt-oss is served in MXFP4 or plain weights."
        )
    return True
