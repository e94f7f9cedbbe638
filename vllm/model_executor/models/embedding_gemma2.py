"""EmbeddingGemma 2: layers of Gemma 4 whose tokens see both ways, and a wider row behind them.

Against Gemma 4: a small input of its own for each layer comes from the embedding alone; full layers
have one key head of twice the width; no layer reads another's keys. Rows are mapped to the width of
vectors (``embedding_projection``) where vectors are made of them. Towers are left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    LayerInputsPlan,
    LayerPlan,
    MlpPlan,
    NormPlan,
    TensorNames,
)
from vllm.model_executor.models.decoder.family_fields import (
    read_activation,
    read_layer_types,
    refuse_quantization,
)
from vllm.model_executor.models.decoder.rope_config import read_rope_by_kind, read_rope_object

_LOCAL, _FULL = "sliding_attention", "full_attention"
_THETAS = {_LOCAL: 10_000.0, _FULL: 1_000_000.0}
_FULL_HEAD_DIM = 512
_PREFIXES = (
    ("language_model.ple.", "model."),
    ("language_model.", "model."),
    ("ple.", "model."),
)
_SPELLINGS = ((r"\.ple_block\.", "."),)
_IGNORED = (
    "embedding_projection.",
    "model.embedding_projection.",
    *("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    "multi_modal_projector.",
)


def read_embedding_gemma2(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of the text part of an EmbeddingGemma 2.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "embedding_gemma2_text", ("embedding_gemma2_text",))
    fields.require("use_bidirectional_attention", True, (True,))
    refuse_quantization(fields)
    num_layers = fields.positive_int("num_hidden_layers", 24)
    kinds = read_layer_types(
        fields, [_FULL if (i + 1) % 6 == 0 else _LOCAL for i in range(num_layers)]
    )
    shapes = _read_shapes(fields, kinds)
    ropes = read_rope_by_kind(fields, (_LOCAL, _FULL))
    # So many tokens on either side, both included.
    window = fields.positive_int("sliding_window", 512) + 1
    mlp = MlpPlan(
        fields.positive_int("intermediate_size", 2048),
        read_activation(fields, "hidden_activation")
        if fields.has("hidden_activation")
        else "gelu_tanh",
    )
    hidden_size = fields.positive_int("hidden_size", 512)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size", 262_144),
        hidden_size=hidden_size,
        max_position_embeddings=fields.positive_int("max_position_embeddings", 262_144),
        layers=tuple(
            LayerPlan(
                window if kind == _LOCAL else 0,
                read_rope_object(ropes.sub_reader(kind), shape.head_dim, _THETAS[kind], fields),
                mlp,
                shape,
            )
            for kind, shape in zip(kinds, shapes, strict=True)
        ),
        attention=shapes[0],
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6), is_sandwich=True),
        has_head=False,
        embedding_scale=hidden_size**0.5,
        names=TensorNames(_PREFIXES, _IGNORED, _SPELLINGS),
        has_layer_scalars=True,
        layer_inputs=LayerInputsPlan(0, fields.positive_int("hidden_size_per_layer_input", 512)),
        sees_both_ways=True,
    ).check()


def _read_shapes(fields: FieldReader, kinds: list[str]) -> list[AttentionShape]:
    """Returns each layer's heads."""
    has_bias = fields.boolean("attention_bias", False)
    local = AttentionShape(
        num_heads=fields.positive_int("num_attention_heads", 4),
        num_kv_heads=fields.positive_int("num_key_value_heads", 2),
        head_dim=fields.positive_int("head_dim", 256),
        scale=1.0,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        has_value_norm=True,
    )
    full = replace(local, num_kv_heads=1, head_dim=_FULL_HEAD_DIM)
    own = fields.sub_reader("per_layer_config")
    shapes = []
    for index, kind in enumerate(kinds):
        shape = full if kind == _FULL else local
        reader = own.sub_reader(str(index))
        shapes.append(
            replace(
                shape,
                head_dim=reader.positive_int("head_dim", shape.head_dim),
                num_kv_heads=reader.positive_int("num_key_value_heads", shape.num_kv_heads),
            )
        )
    return shapes
