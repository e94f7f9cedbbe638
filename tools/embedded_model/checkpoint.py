"""Training parameters to published tensors and back; writes and reads model.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.embedded_model.forward import Attention, Block, HyperHead, HyperMix, MoE, TrainModel


def published_tensors(model: TrainModel) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint under its published name, as views of the model's.

    Writing into them (``load_weights``) changes the model.
    """
    tensors = {
        "embed.weight": model.embed,
        "head.weight": model.head,
        "norm.weight": model.norm,
        **_head_tensors(model.hc_head, "hc_head"),
    }
    for i, block in enumerate(model.blocks):
        tensors |= _block_tensors(block, f"layers.{i}")
    mtp = model.mtp
    tensors |= _block_tensors(mtp.block, "mtp.0") | _head_tensors(mtp.hc_head, "mtp.0.hc_head")
    for name in ("e_proj", "h_proj", "enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = getattr(mtp, name)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _head_tensors(head: HyperHead | HyperMix, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}_{name}": getattr(head, name) for name in ("fn", "base", "scale")}


def _block_tensors(block: Block, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.attn_norm.weight": block.attn_norm,
        f"{prefix}.ffn_norm.weight": block.ffn_norm,
        **_head_tensors(block.hc_attn, f"{prefix}.hc_attn"),
        **_head_tensors(block.hc_ffn, f"{prefix}.hc_ffn"),
        **_attention_tensors(block.attn, f"{prefix}.attn"),
        **_moe_tensors(block.ffn, f"{prefix}.ffn"),
    }


def _attention_tensors(attn: Attention, prefix: str) -> dict[str, Tensor]:
    names = ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")
    tensors: dict[str, Tensor] = {f"{prefix}.{name}.weight": getattr(attn, name) for name in names}
    tensors[f"{prefix}.attn_sink"] = attn.attn_sink
    compressors = {}
    if attn.ratio:
        compressors[f"{prefix}.compressor"] = attn.compressor
    if attn.ratio == 4:
        tensors[f"{prefix}.indexer.wq_b.weight"] = attn.index_wq
        tensors[f"{prefix}.indexer.weights_proj.weight"] = attn.index_weights
        compressors[f"{prefix}.indexer.compressor"] = attn.index_compressor
    for name, compressor in compressors.items():
        tensors[f"{name}.ape"] = compressor.ape
        for leaf in ("wkv", "wgate", "norm"):
            tensors[f"{name}.{leaf}.weight"] = getattr(compressor, leaf)
    return tensors


def _moe_tensors(moe: MoE, prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {f"{prefix}.gate.weight": moe.gate}
    if moe.hashed:
        tensors[f"{prefix}.gate.tid2eid"] = moe.tid2eid
    else:
        tensors[f"{prefix}.gate.bias"] = moe.bias
    last = moe.w1.shape[0] - 1
    for expert in range(last + 1):
        name = f"{prefix}.shared_experts" if expert == last else f"{prefix}.experts.{expert}"
        for leaf in ("w1", "w2", "w3"):
            tensors[f"{name}.{leaf}.weight"] = getattr(moe, leaf)[expert]
    return tensors


def save_weights(model: TrainModel, file: Path) -> None:
    """Write model.safetensors: matrices and norms in bfloat16, the rest as published."""
    keep = (".ape", ".attn_sink", "_fn", "_base", "_scale", ".gate.bias", ".tid2eid")
    tensors = {
        name: (tensor if name.endswith(keep) else tensor.bfloat16()).contiguous().clone()
        for name, tensor in published_tensors(model).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for the owner alone


def load_weights(model: TrainModel, file: Path) -> None:
    """Fill the model from model.safetensors.

    Raises:
        KeyError: A tensor is missing.
    """
    loaded = load_file(file)
    with torch.no_grad():
        for name, tensor in published_tensors(model).items():
            tensor.copy_(loaded[name])


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint's folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config
