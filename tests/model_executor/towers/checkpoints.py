"""Tiny models with eyes as transformers writes them, and its answers to prompts with pictures.

Only tests use it. It runs in fp32, a whole sequence at a time.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.tokenizers.family_tokenizers import byte_level

VOCAB_SIZE = 320
IMAGE_ID, VIDEO_ID = 300, 302
_WIDTH = 48
_NONE: Mapping[str, Any] = MappingProxyType({})

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _WIDTH,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA4_TEXT: dict[str, Any] = {
    **_TEXT,
    "model_type": "gemma4_text",
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "final_logit_softcapping": 30.0,
}
_GEMMA4_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 256,
}
_IDS = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}


def gemma4e() -> dict[str, Any]:
    """Returns a Gemma 4 like E2B: causal pictures, clipped products, inputs of layers."""
    text = {
        **_GEMMA4_TEXT,
        "num_key_value_heads": 1,
        "sliding_window": 40,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
    return _gemma4(text, {"use_clipped_linears": True})


def gemma4v() -> dict[str, Any]:
    """Returns a Gemma 4 like 31B: both ways inside windows, a standardised tower."""
    text = {
        **_GEMMA4_TEXT,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 24,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    }
    return _gemma4(text, {"standardize": True})


def gemma4unified() -> dict[str, Any]:
    """Returns a Gemma 4 like 12B: an embedder, both ways everywhere, windows or not."""
    text = {
        **_GEMMA4_TEXT,
        "model_type": "gemma4_unified_text",
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 40,
        "use_bidirectional_attention": "vision",
    }
    vision = {
        "model_type": "gemma4_unified_vision",
        "mm_embed_dim": 48,
        "output_proj_dims": 48,
        "mm_posemb_size": 64,
    }
    raw = _gemma4(text, {})
    return {**raw, "model_type": "gemma4_unified", "vision_config": vision}


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {**_GEMMA4_VISION, **vision},
        "audio_config": None,
        "tie_word_embeddings": True,
        **_IDS,
    }


def gemma3() -> dict[str, Any]:
    """Returns a Gemma 3: pictures of 16 soft tokens that see themselves both ways everywhere."""
    text = {
        **_TEXT,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 112,
        "patch_size": 14,
        "vision_use_head": False,
    }
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE_ID,
        "boi_token_index": 301,
        "eoi_token_index": 303,
        "tie_word_embeddings": True,
    }


def qwen35() -> dict[str, Any]:
    """Returns a Qwen 3.5: three positions a row, recurrent layers."""
    return _qwen35("qwen3_5", {"intermediate_size": 80})


def qwen35moe() -> dict[str, Any]:
    """Returns the same with experts."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
    return _qwen35("qwen3_5_moe", experts)


def _qwen35(model_type: str, own: dict[str, Any]) -> dict[str, Any]:
    text = {
        **{name: value for name, value in _TEXT.items() if name != "intermediate_size"},
        "model_type": f"{model_type}_text",
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        **own,
    }
    vision = {
        "model_type": model_type,
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_heads": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": _WIDTH,
        "deepstack_visual_indexes": [],
    }
    return {
        "model_type": model_type,
        "text_config": text,
        "vision_config": vision,
        "vision_start_token_id": 301,
        "vision_end_token_id": 303,
        "tie_word_embeddings": True,
        **_IDS,
    }


FAMILIES = {
    "gemma4e": gemma4e,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "gemma4v": gemma4v,
    "gemma4unified": gemma4unified,
    "gemma3": gemma3,
}


Sizes = Mapping[str, Any]


def build_model(family: str, vision: Sizes = _NONE, text: Sizes = _NONE, seed: int = 100) -> Any:
    """Build transformers' model, every tensor drawn so that it matters.

    Args:
        family: Its name.
        vision: Sizes of the tower that are others.
        text: Those of the rest.
        seed: Of the draws.
    """
    raw = FAMILIES[family]()
    raw["vision_config"] |= vision
    raw["text_config"] |= text
    if family == "gemma3":
        side = raw["vision_config"]["image_size"] // raw["vision_config"]["patch_size"] // 2
        raw["mm_tokens_per_image"] = min(side, 16) ** 2
    kind = raw.pop("model_type")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **raw)
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config)
    model.train(False)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _draw(kind, name, tensor, torch.randn(tensor.shape, generator=generator))
    return model


def _draw(kind: str, name: str, tensor: torch.Tensor, noise: torch.Tensor) -> None:
    if name.endswith(("input_min", "output_min")):
        tensor.fill_(-3.0)
    elif name.endswith(("input_max", "output_max")):
        tensor.fill_(3.0)
    elif name.endswith("std_scale"):
        tensor.copy_(0.3 + 0.05 * noise)
    elif "norm" in name and name.endswith("weight"):
        is_tower = "visual." in name or "vision_tower" in name
        is_less_one = kind.startswith(("gemma3", "qwen3_5")) and "linear_attn" not in name
        base = 0.0 if is_less_one and not is_tower else 1.0
        tensor.copy_(base + 0.2 * noise)
    elif name.endswith("A_log"):
        tensor.copy_(-2.0 + 0.5 * noise)
    elif name.endswith(("dt_bias", "conv1d.weight")):
        tensor.copy_(0.5 * noise)
    elif name.endswith("layer_scalar"):
        tensor.copy_(1.0 + 0.1 * noise)
    elif name.endswith("bias"):
        tensor.copy_(0.2 * noise)
    elif "embed_tokens" in name:
        tensor.copy_(0.15 * noise)
    elif "position" in name or "pos_embed" in name:
        tensor.copy_(0.5 * noise)
    elif tensor.is_floating_point() and tensor.dim():
        tensor.copy_(noise * 1.3 * tensor.shape[-1] ** -0.5)


def write_checkpoint(family: str, folder: Path, vision: Sizes = _NONE, text: Sizes = _NONE) -> Any:
    """Write a family's checkpoint with a tokenizer; returns transformers' model."""
    model = build_model(family, vision, text)
    model.save_pretrained(folder)
    tokenizer = byte_level()
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    config = {**tokenizer.template_tokens, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def draw_picture(family: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return pixels uint8 [H, W, 3] of a picture of rows x columns soft tokens."""
    side = 28 if family == "gemma3" else 48 if family.startswith("gemma4") else 32
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (rows * 2, columns * 2, 3))
    fine = coarse.repeat(side // 2, 0).repeat(side // 2, 1)
    noise = generator.integers(-20, 21, fine.shape)
    return np.clip(fine + noise, 0, 255).astype(np.uint8)


def reference_logits(
    family: str, model: Any, token_ids: Sequence[int], pictures: Sequence[np.ndarray]
) -> torch.Tensor:
    """Return transformers' logits [T, V] of a whole sequence."""
    ids = torch.tensor([list(token_ids)])
    kinds = (ids == IMAGE_ID).long()
    inputs: dict[str, Any] = {}
    if pictures:
        inputs = _INPUTS[family](pictures)
        inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = kinds
    if family.startswith("qwen35"):
        model.model.rope_deltas = None
    with torch.inference_mode():
        return model(ids, use_cache=False, **inputs).logits[0]


def reference_rows(family: str, model: Any, picture: np.ndarray) -> torch.Tensor:
    """Return the rows [N, D] that transformers' tower makes of a picture."""
    with torch.inference_mode():
        made = model.get_image_features(**_INPUTS[family]([picture]))
    rows = getattr(made, "pooler_output", made)
    while not isinstance(rows, torch.Tensor):
        rows = rows[0]
    return rows.flatten(0, -2)


def _gemma3_inputs(pictures: Sequence[np.ndarray]) -> dict[str, Any]:
    stacked = torch.stack([torch.from_numpy(picture).permute(2, 0, 1) for picture in pictures])
    return {"pixel_values": (stacked.float() / 255 - 0.5) / 0.5}


def _gemma4_inputs(pictures: Sequence[np.ndarray]) -> dict[str, Any]:
    rows = [_cut(picture, 16) for picture in pictures]
    most = max(len(patches) for patches, _ in rows)
    pixels = torch.zeros(len(rows), most, 768)
    places = torch.full((len(rows), most, 2), -1, dtype=torch.long)
    for index, (patches, own) in enumerate(rows):
        pixels[index, : len(patches)] = patches
        places[index, : len(patches)] = own
    return {"pixel_values": pixels, "image_position_ids": places}


def _unified_inputs(pictures: Sequence[np.ndarray]) -> dict[str, Any]:
    rows = [_cut(picture, 48) for picture in pictures]
    most = max(len(cells) for cells, _ in rows)
    pixels = torch.zeros(len(rows), most, 48 * 48 * 3)
    places = torch.full((len(rows), most, 2), -1, dtype=torch.long)
    for index, (cells, own) in enumerate(rows):
        pixels[index, : len(cells)] = cells
        places[index, : len(cells)] = own
    return {"pixel_values": pixels, "image_position_ids": places}


def _cut(picture: np.ndarray, patch: int) -> tuple[torch.Tensor, torch.Tensor]:
    height, width = picture.shape[0] // patch, picture.shape[1] // patch
    cut = torch.from_numpy(picture).view(height, patch, width, patch, 3).transpose(1, 2)
    ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return cut.flatten(2).flatten(0, 1).float() / 255, torch.stack([xs, ys], -1).flatten(0, 1)


def _qwen_inputs(pictures: Sequence[np.ndarray]) -> dict[str, Any]:
    rows, grids = [], []
    for picture in pictures:
        height, width = picture.shape[0] // 16, picture.shape[1] // 16
        scaled = (torch.from_numpy(picture).float() / 255 - 0.5) / 0.5
        cut = scaled.view(height // 2, 2, 16, width // 2, 2, 16, 3)
        blocks = cut.permute(0, 3, 1, 4, 6, 2, 5).reshape(height * width, 3, 1, 16, 16)
        rows.append(blocks.expand(-1, -1, 2, -1, -1).flatten(1))
        grids.append([1, height, width])
    return {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor(grids)}


_INPUTS = {
    "gemma3": _gemma3_inputs,
    "gemma4e": _gemma4_inputs,
    "gemma4v": _gemma4_inputs,
    "gemma4unified": _unified_inputs,
    "qwen35": _qwen_inputs,
    "qwen35moe": _qwen_inputs,
}
