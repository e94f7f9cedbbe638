"""GLM 5.3 Flash: recurrent layers with bounded decays, latent attention to chosen keys, experts.

No layer knows positions. Four residual streams are mixed around each half of a layer, as
DeepSeek-V4's; their mean is read at the end. The wrapper with vision is served as text.
Source: the releases' config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    MTP,
    AttentionShape,
    DecoderConfig,
    FeedForwardPlan,
    GatedDeltaPlan,
    HyperPlan,
    IndexerPlan,
    LatentShape,
    LayerPlan,
    MlpPlan,
    NormPlan,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    DENSE,
    SPARSE,
    read_layer_types,
    read_mlp_types,
    read_scored_experts,
    refuse_quantization,
)
from vllm.model_executor.models.glm4_moe import drafting_names

_RECURRENT = "linear_attention"
_INDEXED = ("indexed_attention", "deepseek_sparse_attention", "full_attention")


def read_glm5_next(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a Glm5NextForConditionalGeneration.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    wrapper = FieldReader(raw)
    wrapper.require("model_type", "glm5_next", ("glm5_next",))
    refuse_quantization(wrapper)
    fields = wrapper.sub_reader("text_config")
    _require_the_releases_maths(fields)
    recurrence, attention = _read_recurrence(fields), _read_attention(fields)
    halves: dict[str, FeedForwardPlan] = {DENSE: _read_dense(fields)}
    half_names = read_mlp_types(fields, 3)
    if SPARSE in half_names:
        limit = fields.number("swiglu_limit", 10.0)
        halves[SPARSE] = read_scored_experts(fields, limit, (288, 8, 2048, 2.5))
    count = fields.positive_int("num_hidden_layers")
    num_drafters = fields.non_negative_int("num_nextn_predict_layers", 1)
    if num_drafters > 1:
        raise fields.error("num_nextn_predict_layers", num_drafters, "0 or 1")
    drafter_half = halves.get(SPARSE, halves[DENSE])
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=fields.positive_int("max_position_embeddings", 1_048_576),
        layers=tuple(
            LayerPlan(0, None, halves[half], recurrence=recurrence if kind == _RECURRENT else None)
            for kind, half in zip(_read_kinds(fields), half_names, strict=True)
        ),
        attention=attention,
        norm=NormPlan(fields.number("rms_norm_eps", 1e-5)),
        has_head=True,
        names=_find_names(count),
        hyper=HyperPlan(
            num_streams=fields.positive_int("hc_mult", 4),
            eps=fields.number("hc_eps", 1e-6),
            num_iterations=fields.positive_int("hc_sinkhorn_iters", 20),
        ),
        drafter=LayerPlan(0, None, drafter_half) if num_drafters else None,
        drafter_skips_first=True,
    ).check()


def _find_names(num_layers: int) -> TensorNames:
    """Returns the spellings; the layer behind the last one drafts."""
    names = drafting_names(num_layers)
    return replace(
        names,
        prefixes=(
            (f"model.language_model.layers.{num_layers}.", f"{MTP}layers.0."),
            ("model.language_model.", "model."),
            ("model.visual.", "visual."),
        ),
        ignored=("visual.", *names.ignored),
    )


def _require_the_releases_maths(fields: FieldReader) -> None:
    """Refuses variants that the releases have no use of.

    Raises:
        ConfigError: One is asked for.
    """
    fields.require("model_type", "glm5_next_text", ("glm5_next_text",))
    fields.require("hidden_act", "silu", ("silu",))
    fields.require("attention_bias", False, (False,))
    fields.require("tie_word_embeddings", False, (False,))
    fields.require("index_kpool_always_select_tail", True, (True,))
    if fields.non_negative_int("qk_rope_head_dim", 0):
        raise fields.error("qk_rope_head_dim", fields.positive_int("qk_rope_head_dim"), "0")
    heads = fields.positive_int("num_attention_heads")
    fields.require("num_key_value_heads", heads, (heads,))
    count = fields.positive_int("num_hidden_layers")
    if fields.has("indexer_types"):
        for kind in fields.sequence("indexer_types", count):
            if kind != "full":
                raise fields.error("indexer_types", kind, "full, in every layer")


def _read_attention(fields: FieldReader) -> AttentionShape:
    pool = fields.positive_int("index_kpool", 16)
    num_tokens = fields.positive_int("index_topk", 2048)
    if num_tokens % pool:
        raise fields.error("index_topk", num_tokens, f"a multiple of index_kpool ({pool})")
    latent = LatentShape(
        latent_dim=fields.positive_int("kv_lora_rank", 512),
        shared_dim=0,
        key_dim=fields.positive_int("qk_nope_head_dim", 256),
        value_dim=fields.positive_int("v_head_dim", 256),
        eps=fields.number("rms_norm_eps", 1e-5),
        query_rank=fields.positive_int("q_lora_rank", 1536),
        indexer=IndexerPlan(
            num_heads=fields.positive_int("index_n_heads", 32),
            head_dim=fields.positive_int("index_head_dim", 128),
            pool_size=pool,
            num_chosen=num_tokens // pool,
        ),
    )
    if latent.row_width % 2:
        raise fields.error("kv_lora_rank", latent.latent_dim, "an even number")
    return AttentionShape(
        num_heads=fields.positive_int("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.row_width,
        scale=latent.key_dim**-0.5,
        latent=latent,
    )


def _read_recurrence(fields: FieldReader) -> GatedDeltaPlan:
    heads = fields.positive_int("linear_num_heads", 64)
    width = fields.positive_int("linear_head_dim", 128)
    return GatedDeltaPlan(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=width,
        value_dim=width,
        conv_width=fields.positive_int("linear_conv_kernel_dim", 4),
        gate_activation="sigmoid",
        has_channel_decays=True,
        decay_bound=-fields.negative_number("linear_lower_bound", -5.0),
    )


def _read_kinds(fields: FieldReader) -> list[str]:
    """Reads which layers are recurrent; unset, all but every fourth.

    Raises:
        ConfigError: Another kind of layer, or all are of one kind.
    """
    count = fields.positive_int("num_hidden_layers")
    default = [_INDEXED[0] if index % 4 == 3 else _RECURRENT for index in range(count)]
    kinds = read_layer_types(fields, default, (_RECURRENT, *_INDEXED))
    if _RECURRENT not in kinds or set(kinds) == {_RECURRENT}:
        raise fields.error("layer_types", kinds, "recurrent layers and others")
    return kinds


def _read_dense(fields: FieldReader) -> MlpPlan:
    return MlpPlan(
        fields.positive_int("intermediate_size"), limit=fields.number("swiglu_limit", 10.0)
    )
