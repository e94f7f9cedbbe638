"""Writes a checkpoint the way ModelSlim does: int8 matrices, scales, offsets, a description."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_ascend.quantization.description import DESCRIPTION_FILE, FLOAT, W8A8_DYNAMIC

# What ModelSlim quantises: attention and expert matrices, not the compressors, gate and head.
_MATRIX = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)"
    r"|ffn\.(experts\.\d+|shared_experts)\.w[123]|[eh]_proj)\.weight"
)


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 [out, in] and the scale [out, 1] of symmetric rows."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale).round().to(torch.int8), scale


def quantise_checkpoint(
    source: Path, folder: Path, skip: str = "", with_offset: bool = True
) -> dict[str, torch.Tensor]:
    """Writes the quantised checkpoint into ``folder``.

    Args:
        source: A folder with one safetensors file.
        folder: Where to write.
        skip: Matrices whose names match this pattern stay as they are.
        with_offset: Whether to store the zero offsets.

    Returns:
        What the checkpoint means: published name -> dequantised tensor.
    """
    (file,) = source.glob("*.safetensors")
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    schemes = {"model_quant_type": W8A8_DYNAMIC, "version": "1.0.0"}
    for name, tensor in load_file(file).items():
        if not _MATRIX.fullmatch(name) or (skip and re.search(skip, name)):
            stored[name] = meaning[name] = tensor
            schemes[name] = FLOAT
            continue
        values, scale = quantise_weight(tensor)
        parts = {name: values, f"{name}_scale": scale}
        if with_offset:
            parts[f"{name}_offset"] = torch.zeros_like(scale)
        stored.update(parts)
        schemes.update(dict.fromkeys(parts, W8A8_DYNAMIC))
        meaning[name] = values.float() * scale
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors")
    (folder / DESCRIPTION_FILE).write_text(json.dumps(schemes))
    return meaning
