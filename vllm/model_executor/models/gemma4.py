"""Gemma 4: windows and full attention of unequal heads, shared keys and values, per-layer inputs.

What is particular: attention without a scale over normed queries, keys and values; full layers
with wider heads, fewer key heads, and in larger models one product for keys and values; a rotary
setting that turns a quarter of their pairs; in E2B and E4B last layers that read the cache of
earlier ones, a wider MLP in these, and a small input of its own for each layer; in 26B-A4B experts
beside the MLP. Norm weights are factors, and each layer's output has one of its own.

Two spellings of a full layer's heads exist: ``global_head_dim`` with
``num_global_key_value_heads`` (releases), and ``per_layer_config`` (transformers 5). Wrappers with
a ``text_config`` are served with their tower for pictures; audio towers are left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.exceptions import ConfigError
from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    ExpertsPlan,
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
from vllm.model_executor.models.decoder.rope_config import (
    RopeConfig,
    read_rope_by_kind,
    read_rope_object,
    refuse_other_theta,
)
from vllm.model_executor.towers.config import read_gemma4_images

_LOCAL, _FULL = "sliding_attention", "full_attention"
# Gemma 3's names for them, which overrides may still give.
_THETA_FIELDS = {_LOCAL: "rope_local_base_freq", _FULL: "rope_theta"}
_THETAS = {_LOCAL: 10_000.0, _FULL: 1_000_000.0}
_TURNED_SHARE = 0.25
_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_TOWERS = (
    "vision_tower",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "vision_embedder",
    "audio_embedder",
    "multi_modal_projector",
)
_PLACEHOLDERS = {
    "image_token_id": 258_880,
    "audio_token_id": 258_881,
    "video_token_id": 258_884,
}
_NO_TEXT = "config.json lacks 'text_config': towers of vision or audio alone are not served"
# More than any model has; a list of as many entries must fit into memory.
_MOST_LAYERS = 10_000
_LAYER_FIELDS = ("head_dim", "num_key_value_heads")


def read_gemma4(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a Gemma4ForCausalLM, or of another model's text part alone.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised.
    """
    fields = FieldReader(raw)
    if fields.has("text_config"):
        return read_gemma4_with_towers(raw)
    fields.require("model_type", _TEXT_TYPES[0], _TEXT_TYPES)
    if any(fields.has(f"{tower}_config") for tower in ("vision", "audio")):
        raise ConfigError(_NO_TEXT)
    refuse_quantization(fields)
    return _read_text(fields, fields.boolean("tie_word_embeddings", True))


def read_gemma4_with_towers(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the text part of a wrapper with vision or audio; raises as ``read_gemma4``."""
    fields = FieldReader(raw)
    fields.require("model_type", "gemma4", ("gemma4", "gemma4_unified"))
    refuse_quantization(fields)
    if not fields.has("text_config"):
        raise ConfigError(_NO_TEXT)
    text = fields.sub_reader("text_config")
    text.require("model_type", _TEXT_TYPES[0], _TEXT_TYPES)
    is_tied = fields.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", True))
    placeholders = tuple(
        fields.non_negative_int(name, default) for name, default in _PLACEHOLDERS.items()
    )
    config = _read_text(text, is_tied)
    images = read_gemma4_images(fields, text, config.hidden_size)
    return replace(config, images=images, placeholder_ids=placeholders)


def _read_text(fields: FieldReader, is_tied: bool) -> DecoderConfig:
    # "vision": only tokens of one picture see each other both ways.
    fields.require("use_bidirectional_attention", None, (None, False, "vision"))
    kinds = _read_kinds(fields)
    owners = _find_owners(fields, kinds)
    shapes = _read_shapes(fields, kinds)
    _check_owners(fields, owners, shapes)
    is_unified = fields.text("model_type", _TEXT_TYPES[0]) == _TEXT_TYPES[1]
    window = fields.positive_int("sliding_window", 1024 if is_unified else 512)
    mlp = MlpPlan(
        fields.positive_int("intermediate_size", 9216),
        read_activation(fields, "hidden_activation")
        if fields.has("hidden_activation")
        else "gelu_tanh",
    )
    wide = mlp
    if fields.boolean("use_double_wide_mlp", False):
        wide = replace(mlp, inner_size=2 * mlp.inner_size)
    experts = _read_experts(fields, mlp)
    ropes = [_read_rope(fields, *item) for item in zip(kinds, shapes, strict=True)]
    hidden_size = fields.positive_int("hidden_size", 2304)
    return DecoderConfig(
        vocab_size=fields.positive_int("vocab_size", 262_144),
        hidden_size=hidden_size,
        max_position_embeddings=fields.positive_int(
            "max_position_embeddings", 262_144 if is_unified else 131_072
        ),
        layers=tuple(
            LayerPlan(
                window if kind == _LOCAL else 0,
                rope,
                mlp if owner is None else wide,
                shape,
                owner,
                experts,
            )
            for kind, rope, shape, owner in zip(kinds, ropes, shapes, owners, strict=True)
        ),
        attention=shapes[0],
        norm=NormPlan(fields.number("rms_norm_eps", 1e-6), is_sandwich=True),
        has_head=not is_tied,
        embedding_scale=hidden_size**0.5,
        final_soft_cap=fields.number("final_logit_softcapping")
        if fields.has("final_logit_softcapping")
        else 0.0,
        names=TensorNames(_PREFIXES, _find_ignored(owners)),
        has_layer_scalars=True,
        layer_inputs=_read_layer_inputs(fields, 0 if is_unified else 256),
    ).check()


def _read_kinds(fields: FieldReader) -> list[str]:
    num_layers = fields.positive_int("num_hidden_layers", 30)
    if num_layers > _MOST_LAYERS:
        raise fields.error("num_hidden_layers", num_layers, f"at most {_MOST_LAYERS}")
    kinds = read_layer_types(
        fields, [_FULL if (i + 1) % 6 == 0 else _LOCAL for i in range(num_layers)]
    )
    num_named = fields.count("layer_types")
    if num_named > num_layers:
        allowed = f"as many as num_hidden_layers ({num_layers})"
        raise fields.error("layer_types", f"{num_named} names", allowed)
    # As the published models have it, whatever the pattern.
    kinds[-1] = _FULL
    return kinds


def read_assistant_layers(fields: FieldReader) -> tuple[LayerPlan, ...]:
    """Reads the layers of an assistant, whose keys and values are its target's.

    Raises:
        ConfigError: As ``read_gemma4``.
    """
    num_layers = fields.positive_int("num_hidden_layers", 4)
    kinds = read_layer_types(fields, [_LOCAL] * (num_layers - 1) + [_FULL])
    window = fields.positive_int("sliding_window", 512)
    mlp = MlpPlan(fields.positive_int("intermediate_size", 9216), "gelu_tanh")
    return tuple(
        LayerPlan(window if kind == _LOCAL else 0, _read_rope(fields, kind, shape), mlp, shape)
        for kind, shape in zip(kinds, _read_shapes(fields, kinds), strict=True)
    )


def _find_owners(fields: FieldReader, kinds: list[str]) -> list[int | None]:
    """Returns by layer whose keys and values it attends to; None: its own.

    The last ``num_kv_shared_layers`` read those of the last layer of their kind before them.
    """
    num_shared = fields.non_negative_int("num_kv_shared_layers", 0)
    first = len(kinds) - num_shared
    if first < 1:
        allowed = f"less than num_hidden_layers ({len(kinds)})"
        raise fields.error("num_kv_shared_layers", num_shared, allowed)
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    missing = sorted({kind for kind in kinds[first:] if kind not in last})
    if missing:
        raise fields.error(
            "num_kv_shared_layers",
            num_shared,
            f"so many that a layer of {missing[0]} before them has keys and values to share",
        )
    owners: list[int | None] = [None] * first
    return owners + [last[kind] for kind in kinds[first:]]


def _check_owners(
    fields: FieldReader, owners: list[int | None], shapes: list[AttentionShape]
) -> None:
    """Refuses a layer whose queries do not fit the keys that it shares.

    Raises:
        ConfigError: There is one.
    """
    for index, owner in enumerate(owners):
        if owner is None:
            continue
        own, shared = shapes[index], shapes[owner]
        for name, value, expected in (
            ("head_dim", own.head_dim, shared.head_dim),
            ("num_key_value_heads", own.num_kv_heads, shared.num_kv_heads),
        ):
            if value != expected:
                allowed = f"{expected}: the layer shares keys and values with layer {owner}"
                raise fields.error(f"per_layer_config.{index}.{name}", value, allowed)


def _read_shapes(fields: FieldReader, kinds: list[str]) -> list[AttentionShape]:
    """Returns each layer's heads, whichever way full layers are spelled."""
    has_bias = fields.boolean("attention_bias", False)
    is_equal = fields.boolean("attention_k_eq_v", False)
    local = AttentionShape(
        num_heads=fields.positive_int("num_attention_heads", 8),
        num_kv_heads=fields.positive_int("num_key_value_heads", 4),
        head_dim=fields.positive_int("head_dim", 256),
        scale=1.0,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_qk_norm=True,
        has_value_norm=True,
    )
    of_layer = fields.sub_reader("per_layer_config")
    full = replace(local, has_one_product=is_equal)
    # A file of the second spelling says nothing of full layers beside it.
    if fields.has("global_head_dim") or not fields.has("per_layer_config"):
        full = replace(full, head_dim=fields.positive_int("global_head_dim", 512))
    if is_equal and fields.has("num_global_key_value_heads"):
        full = replace(full, num_kv_heads=fields.positive_int("num_global_key_value_heads"))
    for name in fields.mapping("per_layer_config"):
        if name not in {str(index) for index in range(len(kinds))}:
            raise of_layer.error(name, "a layer", f"a layer's number below {len(kinds)}")
    shapes = []
    for index, kind in enumerate(kinds):
        shape, own = full if kind == _FULL else local, of_layer.mapping(str(index))
        reader = of_layer.sub_reader(str(index))
        for name in own:
            if name not in _LAYER_FIELDS:
                raise reader.error(name, own[name], f"one of {', '.join(_LAYER_FIELDS)}")
        found = replace(
            shape,
            head_dim=reader.positive_int("head_dim", shape.head_dim),
            num_kv_heads=reader.positive_int("num_key_value_heads", shape.num_kv_heads),
        )
        if kind == _FULL:
            _refuse_contradiction(fields, reader, found)
        shapes.append(found)
    return shapes


def _refuse_contradiction(fields: FieldReader, reader: FieldReader, found: AttentionShape) -> None:
    """Refuses a full layer of which the two spellings say different things.

    Raises:
        ConfigError: The second spelling's field, with what the first one says.
    """
    for name, value, other in (
        ("head_dim", found.head_dim, "global_head_dim"),
        ("num_key_value_heads", found.num_kv_heads, "num_global_key_value_heads"),
    ):
        if reader.has(name) and fields.has(other) and fields.positive_int(other) != value:
            said = fields.positive_int(other)
            raise reader.error(name, value, f"{said}, which {other} says")


def _read_experts(fields: FieldReader, mlp: MlpPlan) -> ExpertsPlan | None:
    if not fields.boolean("enable_moe_block", False):
        return None
    chosen = "top_k_experts" if fields.has("top_k_experts") else "num_experts_per_tok"
    inner = "moe_intermediate_size"
    if not fields.has(inner) and fields.has("expert_intermediate_size"):
        inner = "expert_intermediate_size"
    return ExpertsPlan(
        num_experts=fields.positive_int("num_experts"),
        num_chosen=fields.positive_int(chosen),
        inner_size=fields.positive_int(inner),
        normalises=True,
        activation=mlp.activation,
    )


def _read_layer_inputs(fields: FieldReader, default_width: int) -> LayerInputsPlan | None:
    width = fields.non_negative_int("hidden_size_per_layer_input", default_width)
    if not width:
        return None
    num_rows = fields.positive_int("vocab_size_per_layer_input", 262_144)
    vocab_size = fields.positive_int("vocab_size", 262_144)
    if num_rows < vocab_size:
        allowed = f"at least vocab_size ({vocab_size}): every token has a row"
        raise fields.error("vocab_size_per_layer_input", num_rows, allowed)
    return LayerInputsPlan(num_rows, width)


def _read_rope(fields: FieldReader, kind: str, shape: AttentionShape) -> RopeConfig:
    # The family never had the older spelling, which would go unread.
    fields.require("rope_scaling", None, (None,))
    own = read_rope_by_kind(fields, (_LOCAL, _FULL)).sub_reader(kind)
    refuse_other_theta(fields, _THETA_FIELDS[kind], own.number("rope_theta", _THETAS[kind]))
    spelled = own.text("rope_type", "proportional" if kind == _FULL else "default")
    if spelled != "proportional":
        return read_rope_object(own, shape.head_dim, _THETAS[kind], fields)
    share = own.number("partial_rotary_factor", _TURNED_SHARE if kind == _FULL else 1.0)
    if share > 1.0:
        raise own.error("partial_rotary_factor", share, "a number up to 1")
    return RopeConfig(
        own.number("rope_theta", _THETAS[kind]),
        shape.head_dim,
        "proportional",
        own.number("factor", 1.0),
        # Counted from the whole width's ladder of frequencies, not from that of the turned part.
        num_turned=int(share * shape.head_dim // 2),
    )


def _find_ignored(owners: list[int | None]) -> tuple[str, ...]:
    """Returns prefixes of what is left out: towers, and keys and values that nobody reads."""
    towers = tuple(f"{prefix}{name}." for prefix in ("model.", "") for name in _TOWERS)
    unread = tuple(
        f"model.layers.{index}.self_attn.{name}."
        for index, owner in enumerate(owners)
        if owner is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    return towers + unread
