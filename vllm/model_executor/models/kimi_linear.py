"""Kimi Linear: recurrent layers with a decay a channel, some of latent attention, routed experts.

No layer knows positions. Experts are scored by sigmoids, chosen with a bias and by groups, and
stand beside a shared one; the first layers are dense. Source: arXiv:2510.26692 and the releases'
config.json.

Layers count from one in ``linear_attn_config``.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
    GatedDeltaPlan,
    LatentShape,
    LayerPlan,
    MlpPlan,
    NormPlan,
    SigmoidRouter,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    DENSE,
    SPARSE,
    check_expert_groups,
    read_activation,
    read_layer_types,
    read_mlp_types,
    refuse_quantization,
)

_RECURRENT, _FULL = _KINDS = ("linear_attention", "full_attention")
# transformers writes a dense layer's MLP by the name of the experts.
_NAMES = TensorNames(
    spellings=((r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.", r".mlp.\1."),),
)


def read_kimi_linear(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a KimiLinearForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "kimi_linear", ("kimi_linear",))
    refuse_quantization(fields)
    _require_the_releases_maths(fields)
    recurrence, attention = _read_recurrence(fields), _read_attention(fields)
    halves: dict[str, FeedForwardPlan] = {DENSE: _read_dense(fields)}
    half_names = read_mlp_types(fields, 1)
    if SPARSE in half_names:
        halves[SPARSE] = _read_experts(fields)
    length = "model_max_length" if fields.has("model_max_length") else "max_position_embeddings"
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=fields.positive_int(length, 1_048_576),
        layers=tuple(
            LayerPlan(0, None, halves[half], recurrence=recurrence if kind == _RECURRENT else None)
            for kind, half in zip(_read_kinds(fields), half_names, strict=True)
        ),
        attention=attention,
        norm=NormPlan(fields.number("rms_norm_eps", 1e-5)),
        has_head=True,
        names=_NAMES,
    ).check()


def _require_the_releases_maths(fields: FieldReader) -> None:
    """Refuses variants that the releases have no use of.

    Raises:
        ConfigError: One is asked for.
    """
    fields.require("mla_use_nope", True, (True,))
    if fields.has("q_lora_rank"):
        raise fields.error("q_lora_rank", fields.positive_int("q_lora_rank"), "null")
    fields.require("moe_router_activation_func", "sigmoid", ("sigmoid",))
    # Convolutions use it too, of which only this one is served.
    fields.require("hidden_act", "silu", ("silu", "swish"))
    fields.require("moe_layer_freq", 1, (1,))
    fields.require("num_nextn_predict_layers", 0, (0,))
    fields.require("attention_bias", False, (False,))
    fields.require("tie_word_embeddings", False, (False,))
    heads = fields.positive_int("num_attention_heads")
    fields.require("num_key_value_heads", heads, (heads,))


def _read_attention(fields: FieldReader) -> AttentionShape:
    latent = LatentShape(
        latent_dim=fields.positive_int("kv_lora_rank", 512),
        shared_dim=fields.positive_int("qk_rope_head_dim", 64),
        key_dim=fields.positive_int("qk_nope_head_dim", 128),
        value_dim=fields.positive_int("v_head_dim", 128),
        # The releases' code has it, not config.json.
        eps=1e-6,
    )
    width = latent.latent_dim + latent.shared_dim
    if width % 2:
        allowed = f"a number that makes an even one with kv_lora_rank ({latent.latent_dim})"
        raise fields.error("qk_rope_head_dim", latent.shared_dim, allowed)
    return AttentionShape(
        num_heads=fields.positive_int("num_attention_heads"),
        num_kv_heads=1,
        head_dim=width,
        scale=(latent.key_dim + latent.shared_dim) ** -0.5,
        latent=latent,
    )


def _read_recurrence(fields: FieldReader) -> GatedDeltaPlan:
    nested = fields.sub_reader("linear_attn_config")
    # transformers spells them without the nested object too.
    heads = nested.positive_int("num_heads", fields.positive_int("linear_num_heads", 32))
    head_dim = nested.positive_int("head_dim", fields.positive_int("linear_head_dim", 128))
    width = nested.positive_int(
        "short_conv_kernel_size", fields.positive_int("linear_conv_kernel_dim", 4)
    )
    if width < 2:
        raise nested.error("short_conv_kernel_size", width, "an integer of at least 2")
    return GatedDeltaPlan(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=width,
        gate_activation="sigmoid",
        has_channel_decays=True,
    )


def _read_kinds(fields: FieldReader) -> list[str]:
    """Reads which layers are recurrent.

    Raises:
        ConfigError: A layer is of no kind or of two, or all are of one kind.
    """
    count = fields.positive_int("num_hidden_layers")
    nested = fields.sub_reader("linear_attn_config")
    full, recurrent = nested.int_list("full_attn_layers"), nested.int_list("kda_layers")
    if fields.has("layer_types"):
        kinds = read_layer_types(fields, [""] * count, _KINDS)
    else:
        if sorted([*full, *recurrent]) != list(range(1, count + 1)):
            allowed = f"all layers from 1 to {count} that are not in kda_layers ({recurrent})"
            raise nested.error("full_attn_layers", full, allowed)
        kinds = [_FULL if index + 1 in full else _RECURRENT for index in range(count)]
    if _FULL not in kinds:
        raise nested.error("full_attn_layers", full, "at least one layer")
    if _RECURRENT not in kinds:
        raise nested.error("kda_layers", recurrent, "at least one layer")
    return kinds


def _read_dense(fields: FieldReader) -> MlpPlan:
    return MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields))


def _read_experts(fields: FieldReader) -> ExpertsPlan:
    activation = read_activation(fields)
    num_experts = fields.positive_int("num_experts", 256)
    router = SigmoidRouter(
        fields.positive_int("num_expert_group", 1),
        fields.positive_int("topk_group", 1),
        fields.number("routed_scaling_factor", 2.446),
        has_numbered_names=True,
    )
    num_chosen = fields.positive_int("num_experts_per_token", 8)
    inner_size = fields.positive_int("moe_intermediate_size", 1024)
    num_shared = fields.non_negative_int("num_shared_experts", 1)
    plan = ExpertsPlan(
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=inner_size,
        normalises=fields.boolean("moe_renormalize", True),
        activation=activation,
        shared=MlpPlan(num_shared * inner_size, activation) if num_shared else None,
        router=router,
    )
    check_expert_groups(fields, plan, router, "num_expert_group", "num_experts_per_token")
    return plan
