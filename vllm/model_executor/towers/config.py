"""Towers as config.json describes them (torch-free)."""

import math

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.towers.plans import (
    BothWays,
    Gemma4TowerPlan,
    ImagesPlan,
    QwenTowerPlan,
    SiglipPlan,
)
from vllm.multimodal.families import gemma3_images, gemma4_images, qwen35_images

_GELU_TANH = ("gelu_pytorch_tanh",)


def read_gemma3_images(fields: FieldReader, width: int) -> ImagesPlan | None:
    """Reads how a Gemma 3 with vision sees pictures; None: it has no tower.

    Args:
        fields: config.json.
        width: Of the model's stream.

    Raises:
        ConfigError: A field is wrong.
    """
    if not fields.mapping("vision_config"):
        return None
    vision = fields.sub_reader("vision_config")
    vision.require("hidden_act", _GELU_TANH[0], _GELU_TANH)
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
    if not fields.mapping("vision_config"):
        return None
    vision = fields.sub_reader("vision_config")
    vision.require("hidden_activation", _GELU_TANH[0], _GELU_TANH)
    num_heads = vision.positive_int("num_attention_heads", 12)
    hidden = vision.positive_int("hidden_size", 768)
    patch, pooling = (
        vision.positive_int("patch_size", 16),
        vision.positive_int("pooling_kernel_size", 3),
    )
    plan = Gemma4TowerPlan(
        num_layers=vision.positive_int("num_hidden_layers", 16),
        width=hidden,
        inner=vision.positive_int("intermediate_size", 3072),
        num_heads=num_heads,
        num_kv_heads=vision.positive_int("num_key_value_heads", num_heads),
        head_dim=vision.positive_int("head_dim", max(1, hidden // num_heads)),
        patch=patch,
        pooling=pooling,
        num_positions=vision.positive_int("position_embedding_size", 10_240),
        out_width=width,
        theta=vision.sub_reader("rope_parameters").number("rope_theta", 100.0),
        eps=vision.number("rms_norm_eps", 1e-6),
        is_clipped=vision.boolean("use_clipped_linears", False),
        is_standardised=vision.boolean("standardize", False),
    )
    family = gemma4_images(
        fields.non_negative_int("image_token_id", 258_880),
        patch,
        pooling,
        fields.positive_int("vision_soft_tokens_per_image", 280),
    )
    sees_both_ways = text.text("use_bidirectional_attention", "") == "vision"
    both_ways: BothWays = "windows" if sees_both_ways else "nowhere"
    return ImagesPlan(family, plan, both_ways, text.non_negative_int("pad_token_id", 0))


def read_qwen3_5_images(fields: FieldReader, width: int) -> ImagesPlan | None:
    """Reads how a Qwen 3.5 with vision sees pictures; None: it has no tower, or one not served.

    Args:
        fields: config.json.
        width: Of the model's stream.

    Raises:
        ConfigError: A field is wrong.
    """
    if not fields.mapping("vision_config"):
        return None
    vision = fields.sub_reader("vision_config")
    vision.require("hidden_act", _GELU_TANH[0], _GELU_TANH)
    patch, merge = (
        vision.positive_int("patch_size", 16),
        vision.positive_int("spatial_merge_size", 2),
    )
    vision.require("deepstack_visual_indexes", None, (None, [], ()))
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
