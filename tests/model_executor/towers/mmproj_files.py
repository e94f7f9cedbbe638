"""Files of towers as conversion to GGUF writes them, by the ``gguf`` package; only tests use it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf  # an oracle of the tests, in requirements/dev.txt
import torch

from tests.model_executor.towers.checkpoints import FAMILIES

_MAP = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
# What the package's map does not know by the names of releases.
_PARTS = {
    "self_attn.q_proj.linear": "attn_q",
    "self_attn.k_proj.linear": "attn_k",
    "self_attn.v_proj.linear": "attn_v",
    "self_attn.o_proj.linear": "attn_out",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj.linear": "ffn_gate",
    "mlp.up_proj.linear": "ffn_up",
    "mlp.down_proj.linear": "ffn_down",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
_MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
_IN_LAYER = re.compile(r"vision_tower\.encoder\.layers\.(\d+)\.(.+)")
PROJECTORS = {"gemma3": "gemma3", "gemma4e": "gemma4v", "gemma4v": "gemma4v"}
PROJECTORS |= {"qwen35": "qwen3vl_merger", "qwen35moe": "qwen3vl_merger"}


def write_mmproj(
    family: str,
    state: Mapping[str, torch.Tensor],
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    splits_heads: bool = False,
    **keys: Any,
) -> Path:
    """Write the tower of a family's model.

    Args:
        family: One of PROJECTORS.
        state: Of transformers' model.
        path: Of the file.
        kind: Type of its matrices.
        splits_heads: Whether queries, keys and values are written apart.
        keys: Other values of ``clip.vision.*``; None: without.
    """
    writer = gguf.GGUFWriter(path, "clip")
    raw = FAMILIES[family]()["vision_config"]
    layers = raw.get("num_hidden_layers", raw.get("depth"))
    colour = (0.0, 1.0) if family.startswith("gemma4") else (0.5, 0.5)
    values: dict[str, Any] = {
        "projector_type": PROJECTORS[family],
        "image_size": raw.get("image_size", 224),
        "patch_size": raw["patch_size"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "block_count": layers,
        "attention.head_count": raw.get("num_attention_heads", raw.get("num_heads")),
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [colour[0]] * 3,
        "image_std": [colour[1]] * 3,
    }
    if family == "gemma3":
        values["projector.scale_factor"] = 2
    if family.startswith("qwen"):
        values["spatial_merge_size"] = raw["spatial_merge_size"]
        values["is_deepstack_layers"] = [False] * layers
    for name, value in {**values, **keys}.items():
        if value is not None:
            _add_key(writer, f"clip.vision.{name}", value)
    for name, tensor in state.items():
        renamed = _rename(family, name.removeprefix("model."), tensor.float())
        if splits_heads:
            renamed = [part for one in renamed for part in _split_heads(*one)]
        for stored, value in renamed:
            plain = value.dim() < 2 or value.shape[-1] % 32 or "embd" in stored
            own = gguf.GGMLQuantizationType.F32 if plain else kind
            data = value.contiguous().numpy()
            if own is not gguf.GGMLQuantizationType.F32:
                data = gguf.quants.quantize(data, own)
            writer.add_tensor(stored, data, raw_dtype=None if data.dtype == "f4" else own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _split_heads(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if ".attn_qkv." not in name:
        return [(name, value)]
    parts = zip("qkv", value.chunk(3), strict=True)
    return [(name.replace("_qkv.", f"_{part}."), own) for part, own in parts]


def _add_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    adders.get(type(value), writer.add_array)(name, value)


def _rename(family: str, name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The file's tensors that hold one of a release; none: it is no tower's."""
    if not name.startswith(("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision.")):
        return []
    if "position_ids" in name or name.endswith("inv_freq"):
        return []
    stem, _, leaf = name.rpartition(".")
    if name.startswith("visual.merger."):
        return [(f"{_MERGER[stem.rpartition('.')[2]]}.{leaf}", value)]
    if name == "visual.patch_embed.proj.weight":
        return [("v.patch_embd.weight", value[:, :, 0]), ("v.patch_embd.weight.1", value[:, :, 1])]
    if name.endswith("patch_embedder.input_proj.weight"):
        patch = int((value.shape[1] // 3) ** 0.5)
        cut = value.view(len(value), patch, patch, 3).permute(0, 3, 1, 2)
        return [("v.patch_embd.weight", cut)]
    if name.endswith("mm_soft_emb_norm.weight"):
        return [("mm.soft_emb_norm.weight", value + 1.0)]
    if name.endswith("mm_input_projection_weight"):
        return [("mm.input_projection.weight", value)]
    if name.endswith("position_embedding_table"):
        return [("v.position_embd.weight", value)]
    if name.endswith(("std_bias", "std_scale")):
        return [(f"v.{leaf}", value)]
    match = _IN_LAYER.fullmatch(name)
    if family.startswith("gemma4") and match is not None:
        part = match[2].rpartition(".")[0]
        if leaf.endswith(("_min", "_max")):
            return [(f"v.blk.{match[1]}.{_PARTS[part + '.linear']}.{leaf}", value.reshape(1))]
        return [(f"v.blk.{match[1]}.{_PARTS[part]}.{leaf}", value)]
    known = name if name.startswith(("visual", "multi")) else f"model.{name}"
    spelled = known.replace("model.vision_tower.", "vision_tower.vision_model.")
    found = _MAP.get_name(spelled, (".weight", ".bias")) or _MAP.get_name(
        known, (".weight", ".bias")
    )
    assert found is not None, name
    return [(found, value)]
