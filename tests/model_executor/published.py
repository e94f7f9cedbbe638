"""Checkpoints in the published spelling, and their tensors decoded value by value."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.layers.quantization.plain_decode import plain_fp4, plain_fp8
from tests.model_executor.models.hf_reference import randomize_
from tools.checkpoints.published_spelling import Spelling
from tools.checkpoints.quantise import quantise_checkpoint
from vllm.model_executor.model_loader.loader import load_model_weights, read_stored_tensors
from vllm.model_executor.model_loader.stored_weights import StoredWeights
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op


def plain_model(raw: dict[str, Any]) -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM(
        DeepseekV4Config.from_dict(raw), ops=get_reference_op, dtype=torch.float32, device="cpu"
    )


def write_published(
    raw: dict[str, Any], folder: Path, spelling: Spelling, max_shard_bytes: int = 40_000
) -> Path:
    """Writes random weights of a config as a sharded, quantised checkpoint."""
    source = folder / "float"
    source.mkdir(parents=True)
    model = plain_model(raw)
    slots = model.weight_slots()
    randomize_(slots, raw["n_routed_experts"], seed=7)
    save_file({name: slot.clone() for name, slot in slots.items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(raw))
    out = folder / "published"
    quantise_checkpoint(source, out, spelling, max_shard_bytes)
    return out


def load_stored(
    folder: Path, dtype: torch.dtype = torch.float32, ops: OpResolver = get_reference_op
) -> DeepseekV4ForCausalLM:
    """Loads a checkpoint as the worker does: what is quantised stays so."""
    raw = json.loads((folder / "config.json").read_text())
    stored = read_stored_tensors(folder)
    quantization = StoredWeights(
        stored,
        raw.get("quantization_config") or {},
        ops=ops,
        in_panels=ops is get_reference_op,
    )
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config.from_dict(raw),
        ops=ops,
        dtype=dtype,
        device="cpu",
        quantization=quantization,
    )
    load_model_weights(model, folder, stored=stored, use_tqdm=False)
    quantization.finish_loading()
    return model


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def decode_plainly(tensors: dict[str, torch.Tensor], spelling: Spelling) -> dict[str, torch.Tensor]:
    """Returns every tensor of a checkpoint in fp32."""
    floats = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if scale is None:
            floats[name] = tensor if name.endswith("tid2eid") else tensor.float()
            continue
        scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
        if tensor.dtype == torch.float8_e4m3fn:
            # Rows of tables have scales of their own.
            block = (1, 32) if ".engram.embed." in name else spelling.block_shape
            floats[name] = plain_fp8(tensor.view(torch.uint8), scale, block)
        else:
            floats[name] = plain_fp4(tensor.view(torch.uint8), scale, spelling.group_size)
    return floats


def fill_plain(raw: dict[str, Any], floats: dict[str, torch.Tensor]) -> DeepseekV4ForCausalLM:
    """Returns the twin: a model that keeps the decoded values as plain fp32."""
    model = plain_model(raw)
    slots = model.weight_slots()
    assert set(slots) == set(floats)
    for name, slot in slots.items():
        slot.copy_(floats[name])
    return model
