"""GLM 4.5 to 4.7: half of a head is turned, experts scored by sigmoids, the first layers dense.

Queries, keys and values have biases; some releases norm queries and keys per head. A layer behind
the last one drafts tokens. Source: arXiv:2508.06471 and the releases' config.json.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    MTP,
    AttentionShape,
    DecoderConfig,
    FeedForwardPlan,
    LayerPlan,
    MlpPlan,
    NormPlan,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    DENSE,
    SPARSE,
    read_activation,
    read_head_dim,
    read_length,
    read_mlp_types,
    read_scored_experts,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import RopeConfig, read_rope

_TURNED_SHARE = 0.5


def read_glm4_moe(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Glm4MoeForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "glm4_moe", ("glm4_moe",))
    refuse_quantization(fields)
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = read_head_dim(fields, num_heads)
    rope = read_rope(fields, head_dim, 10_000.0, default_share=_TURNED_SHARE)
    mlp = MlpPlan(fields.positive_int("intermediate_size"), read_activation(fields))
    halves: dict[str, FeedForwardPlan] = {DENSE: mlp}
    half_names = read_mlp_types(fields, 1)
    if SPARSE in half_names:
        halves[SPARSE] = read_scored_experts(fields)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=fields.positive_int("hidden_size"),
        max_position_embeddings=read_length(fields, rope),
        layers=tuple(LayerPlan(0, rope, halves[half]) for half in half_names),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            has_qkv_bias=fields.boolean("attention_bias", False),
            has_qk_norm=fields.boolean("use_qk_norm", False),
        ),
        norm=NormPlan(fields.number("rms_norm_eps", 1e-5)),
        has_head=not fields.boolean("tie_word_embeddings", False),
        names=drafting_names(len(half_names)),
        drafter=find_drafter(fields, rope, halves),
        drafter_skips_first=True,
    ).check()


def find_drafter(
    fields: FieldReader, rope: RopeConfig, halves: Mapping[str, FeedForwardPlan]
) -> LayerPlan | None:
    """Returns the layer behind the last one, which has experts if any has; None: there is none."""
    if not fields.non_negative_int("num_nextn_predict_layers", 0):
        return None
    return LayerPlan(0, rope, halves.get(SPARSE, halves[DENSE]))


def drafting_names(num_layers: int) -> TensorNames:
    """Returns the spellings of a family whose layer behind the last one drafts."""
    block = f"{MTP}layers.0."
    own = re.escape(block)
    return TensorNames(
        prefixes=((f"model.layers.{num_layers}.", block),),
        # Its embedding and its head are copies of the model's.
        ignored=(MTP, f"{block}embed_tokens.", f"{block}shared_head.head."),
        spellings=(
            (rf"^{own}eh_proj\.", f"{MTP}fc."),
            (rf"^{own}enorm\.", f"{MTP}pre_fc_norm_embedding."),
            (rf"^{own}hnorm\.", f"{MTP}pre_fc_norm_hidden."),
            (rf"^{own}shared_head\.norm\.", f"{MTP}norm."),
        ),
    )
