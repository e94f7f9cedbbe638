"""Qwen 2, 2.5 and 3: like Llama. Qwen 3 norms queries and keys per head, and some have experts.

Qwen 2 and 2.5 add a bias to queries, keys and values and norm neither. Sources: arXiv:2407.10671,
arXiv:2505.09388. A window is in the config of some releases but off; where it is on, layers
from ``max_window_layers`` have it (dense models), or all (experts).
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
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


def read_qwen2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen2ForCausalLM: Qwen 2, 2.5, distills; see ``read_qwen3``."""
    fields = FieldReader(raw)
    fields.require("model_type", "qwen2", ("qwen2",))
    return _read_dense(fields, head_dim=None, is_third=False)


def read_qwen3(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen3ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "qwen3", ("qwen3",))
    return _read_dense(fields, head_dim=128, is_third=True)


def _read_dense(fields: FieldReader, head_dim: int | None, is_third: bool) -> DecoderConfig:
    num_layers = fields.positive_int("num_hidden_layers")
    window = _read_window(fields)
    first = fields.non_negative_int("max_window_layers", 28)
    kinds = read_layer_types(
        fields,
        [
            "sliding_attention" if window and i >= first else "full_attention"
            for i in range(num_layers)
        ],
    )
    if not window and "sliding_attention" in kinds:
        raise fields.error("layer_types", "sliding_attention", "full_attention: no window is set")
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    mlp = MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields))
    return _read(fields, windows, [mlp] * num_layers, head_dim, is_third=is_third)


def read_qwen3_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen3MoeForCausalLM; raises as ``read_qwen3``."""
    fields = FieldReader(raw)
    fields.require("model_type", "qwen3_moe", ("qwen3_moe",))
    num_layers = fields.positive_int("num_hidden_layers")
    step = fields.positive_int("decoder_sparse_step", 1)
    dense_layers = fields.int_list("mlp_only_layers")
    activation = read_activation(fields)
    num_experts = fields.positive_int(
        "num_local_experts" if fields.has("num_local_experts") else "num_experts", 128
    )
    experts = ExpertsPlan(
        num_experts=num_experts,
        num_chosen=fields.positive_int("num_experts_per_tok", 8),
        inner_size=fields.positive_int("moe_intermediate_size", 768),
        normalises=fields.boolean("norm_topk_prob", False),
        activation=activation,
    )
    mlp = MlpPlan(fields.positive_int("intermediate_size"), activation)
    plans: list[FeedForwardPlan] = [
        experts if i not in dense_layers and (i + 1) % step == 0 else mlp for i in range(num_layers)
    ]
    return _read(fields, [_read_window(fields)] * num_layers, plans, head_dim=None)


def read_qwen2_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Qwen2MoeForCausalLM: experts beside a gated shared one.

    Raises as ``read_qwen3``.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "qwen2_moe", ("qwen2_moe",))
    fields.require("qkv_bias", True, (True,))
    num_layers = fields.positive_int("num_hidden_layers")
    step, dense = fields.positive_int("decoder_sparse_step", 1), fields.int_list("mlp_only_layers")
    activation = read_activation(fields)
    experts = ExpertsPlan(
        num_experts=fields.positive_int("num_experts", 60),
        num_chosen=fields.positive_int("num_experts_per_tok", 4),
        inner_size=fields.positive_int("moe_intermediate_size", 1408),
        normalises=fields.boolean("norm_topk_prob", False),
        activation=activation,
        shared=MlpPlan(fields.positive_int("shared_expert_intermediate_size", 5632), activation),
    )
    mlp = MlpPlan(fields.positive_int("intermediate_size", 5632), activation)
    plans: list[FeedForwardPlan] = [
        experts if i not in dense and (i + 1) % step == 0 else mlp for i in range(num_layers)
    ]
    if fields.boolean("use_sliding_window", False):
        raise fields.error("use_sliding_window", True, "false")
    return _read(fields, [0] * num_layers, plans, head_dim=None, is_third=False)


def _read_window(fields: FieldReader) -> int:
    if not fields.boolean("use_sliding_window", False):
        return 0
    return fields.positive_int("sliding_window", 4096)


def _read(
    fields: FieldReader,
    windows: list[int],
    plans: list[FeedForwardPlan],
    head_dim: int | None,
    *,
    is_third: bool = True,
) -> DecoderConfig:
    refuse_quantization(fields)
    num_heads = fields.positive_int("num_attention_heads")
    if head_dim is None or fields.has("head_dim"):
        head_dim = read_head_dim(fields, num_heads)
    # The second's are there whatever its config says.
    has_bias = is_third and fields.boolean("attention_bias", False)
    rope = read_rope(fields, head_dim, theta=10_000.0)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=tuple(
            LayerPlan(window, rope, plan) for window, plan in zip(windows, plans, strict=True)
        ),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_qkv_bias=has_bias or not is_third,
            has_output_bias=has_bias,
            has_qk_norm=is_third,
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6)),
        has_head=not fields.boolean("tie_word_embeddings", False),
    ).check()
