"""Towers as config.json describes them (torch-free)."""

import math

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.towers.plans import (
    BothWays,
    Gemma4EmbedderPlan,
    Gemma4TowerPlan,
    ImagesPlan,
    QwenTowerPlan,
    SiglipPlan,
)
from vllm.multimodal.families import gemma3_images, gemma4_images, qwen35_images

_GELU_TANH = "gelu_pytorch_tanh"


def _find_vision(fields: FieldReader, activation: str) -> FieldReader | None:
    """Returns the tower's part of config.json; None: there is none that is served."""
    vision = fields.sub_reader("vision_config")
    is_served = vision.text(activation, _GELU_TANH) == _GELU_TANH
    return vision if fields.mapping("vision_config") and is_served else None


def read_gemma3_images(fields: FieldReader, width: int) -> ImagesPlan | None:
    """Reads how a Gemma 3 with vision sees pictures; None: it has no tower.

    Args:
        fields: config.json.
        width: Of the model's stream.

    Raises:
        ConfigError: A field is wrong.
    """
    vision = _find_vision(fields, "hidden_act")
    if vision is None:
        return None
    patch, image_size = (
        vision.positive_int("patch_size", 14),
        vision.positive_int("image_size", 896),
    )
    num_tokens = fields.positive_int("mm_tokens_per_image", 256)
    tokens_a_side = math.isqrt(num_tokens)
    if tokens_a_side**2 != num_tokens:
        raise fields.error("mm_tokens_per_image", num_tokens, "a square number")
    name = "image_token_id" if fields.has("image_token_id") else "image_token_index"
    plan = SiglipPlan(
        num_layers=vision.positive_int("num_hidden_layers", 27),
        width=vision.positive_int("hidden_size", 1152),
        inner=vision.positive_int("intermediate_size", 4304),
        num_heads=vision.positive_int("num_attention_heads", 16),
        patch=patch,
        patches_a_side=image_size // patch,
        tokens_a_side=tokens_a_side,
        out_width=width,
        eps=vision.number("layer_norm_eps", 1e-6),
    )
    placeholder = fields.non_negative_int(name, 262_144)
    return ImagesPlan(gemma3_images(placeholder, image_size, num_tokens), plan, "everywhere")


def read_gemma4_images(fields: FieldReader, text: FieldReader, width: int) -> ImagesPlan | None:
    """Reads how a Gemma 4 with a tower sees pictures; None: it has none, or one not served.

    Args:
        fields: config.json.
        text: Its text part.
        width: Of the model's stream.

    Raises:
        ConfigError: A field is wrong.
    """
    vision = _find_vision(fields, "hidden_activation")
    if vision is None:
        return None
    patch = vision.positive_int("patch_size", 16)
    pooling = vision.positive_int("pooling_kernel_size", 3)
    is_unified = fields.text("model_type", "gemma4") == "gemma4_unified"
    family = gemma4_images(
        fields.non_negative_int("image_token_id", 258_880),
        patch,
        pooling,
        fields.positive_int("vision_soft_tokens_per_image", 280),
        _read_embedder_positions(vision) if is_unified else _read_positions(vision) // pooling,
    )
    sees_both_ways = text.text("use_bidirectional_attention", "") == "vision"
    pad_id = text.non_negative_int("pad_token_id", 0)
    if not is_unified:
        both_ways: BothWays = "windows" if sees_both_ways else "nowhere"
        tower = _read_gemma4_tower(vision, patch, pooling, width)
        return ImagesPlan(family, tower, both_ways, pad_id)
    # Full layers see a picture both ways, too, and its rows see all of it whatever the window: the
    # window hides none of a picture that is no longer. Rows of a longer one might not be stored.
    longest = text.positive_int("sliding_window", 1024) if sees_both_ways else 0
    return ImagesPlan(
        family,
        _read_embedder(vision, patch * pooling, width),
        "everywhere" if sees_both_ways else "nowhere",
        pad_id,
        longest,
    )


def _read_embedder_positions(vision: FieldReader) -> int:
    """Cells of a side for which there are positions."""
    return vision.positive_int("mm_posemb_size", 1120)


def _read_positions(vision: FieldReader) -> int:
    """Patches of a side for which there are positions."""
    return vision.positive_int("position_embedding_size", 10_240)


def _read_embedder(vision: FieldReader, cell: int, width: int) -> Gemma4EmbedderPlan:
    return Gemma4EmbedderPlan(
        width=vision.positive_int("mm_embed_dim", 3840),
        cell=cell,
        num_positions=_read_embedder_positions(vision),
        out_width=width,
        eps=vision.number("rms_norm_eps", 1e-6),
    )


def _read_gemma4_tower(
    vision: FieldReader, patch: int, pooling: int, width: int
) -> Gemma4TowerPlan:
    num_heads = vision.positive_int("num_attention_heads", 12)
    hidden = vision.positive_int("hidden_size", 768)
    return Gemma4TowerPlan(
        num_layers=vision.positive_int("num_hidden_layers", 16),
        width=hidden,
        inner=vision.positive_int("intermediate_size", 3072),
        num_heads=num_heads,
        num_kv_heads=vision.positive_int("num_key_value_heads", num_heads),
        head_dim=vision.positive_int("head_dim", max(1, hidden // num_heads)),
        patch=patch,
        pooling=pooling,
        num_positions=_read_positions(vision),
        out_width=width,
        theta=vision.sub_reader("rope_parameters").number("rope_theta", 100.0),
        eps=vision.number("rms_norm_eps", 1e-6),
        is_clipped=vision.boolean("use_clipped_linears", False),
        is_standardised=vision.boolean("standardize", False),
    )


def read_qwen3_5_images(fields: FieldReader, width: int) -> ImagesPlan | None:
    """Reads how a Qwen 3.5 with vision sees pictures; None: it has no tower, or one not served.

    Args:
        fields: config.json.
        width: Of the model's stream.

    Raises:
        ConfigError: A field is wrong.
    """
    vision = _find_vision(fields, "hidden_act")
    if vision is None:
        return None
    patch, merge = (
        vision.positive_int("patch_size", 16),
        vision.positive_int("spatial_merge_size", 2),
    )
    if vision.int_list("deepstack_visual_indexes"):
        return None
    plan = QwenTowerPlan(
        num_layers=vision.positive_int("depth", 27),
        width=vision.positive_int("hidden_size", 1152),
        inner=vision.positive_int("intermediate_size", 4304),
        num_heads=vision.positive_int("num_heads", 16),
        patch=patch,
        num_frames=vision.positive_int("temporal_patch_size", 2),
        merge=merge,
        positions_a_side=math.isqrt(vision.positive_int("num_position_embeddings", 2304)),
        out_width=width,
    )
    family = qwen35_images(fields.non_negative_int("image_token_id", 248_056), patch, merge)
    return ImagesPlan(family, plan)
