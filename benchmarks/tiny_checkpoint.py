"""A tiny DeepSeek-V4 checkpoint whose MTP block agrees with the model most of the time.

Random weights make a block that is never right, which would hide its errors. Here the main model
says ``successor(token)``, some noise from its attention and experts apart, and so does the block:

* hyper-connections carry the embedding through every layer unchanged (their mixing matrices keep
  the sum of equal streams), and ``noise`` scales what the layers add to it;
* ``head.weight`` gives the embedding of a token to its successor;
* ``mtp.0.e_proj`` is the identity, so the block sees the embedding of the token before the one it
  drafts; ``mtp_noise`` scales what else it sees and adds.

How often they agree is then a matter of the two noises.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.model_executor.models.tiny_config import tiny_config as tiny_v4_config
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.v1.attention.ops.registry import get_reference_op

VOCAB_SIZE = 264
"""The ids of a byte-level vocabulary with a few merges."""


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Return the published spelling of a config with every layer type and an MTP block."""
    ours = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 128, 0],
        "num_nextn_predict_layers": 1,
        "torch_dtype": "float32",
    }
    return tiny_v4_config(**{**ours, **overrides})


def make_tensors(
    config: dict[str, Any], *, seed: int = 0, noise: float = 1.0, mtp_noise: float = 1.0
) -> dict[str, torch.Tensor]:
    """Make the tensors by published name.

    Args:
        config: config.json.
        seed: Of all random numbers.
        noise: Scale of what the main model's layers add to a token's embedding.
        mtp_noise: Scale of what the MTP block adds to the next token's embedding.
    """
    generator = torch.Generator().manual_seed(seed)
    parsed = DeepseekV4Config.from_dict(config)
    model = DeepseekV4ForCausalLM(parsed, ops=get_reference_op, dtype=torch.float32, device="cpu")
    tensors = {
        name: _draw(name, slot, parsed.n_routed_experts, generator)
        for name, slot in model.weight_slots().items()
    }
    for name, tensor in tensors.items():
        scale = mtp_noise if name.startswith("mtp.") else noise
        if name.endswith(("attn.wo_b.weight", ".w2.weight", "h_proj.weight")):
            tensor *= scale
    embedding = tensors["embed.weight"]
    tensors["head.weight"] = embedding[predecessors(seed, embedding.shape[0])].clone()
    tensors["mtp.0.e_proj.weight"] = torch.eye(embedding.shape[1])
    for name in ("norm", "mtp.0.norm", "mtp.0.enorm"):
        tensors[f"{name}.weight"] = torch.ones(embedding.shape[1])
    return tensors


def predecessors(seed: int, vocab_size: int) -> torch.Tensor:
    """Return for each token the one it follows: a single cycle through the vocabulary."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed + 1))
    before = torch.empty_like(order)
    before[order] = order.roll(1)
    return before


def _draw(
    name: str, slot: torch.Tensor, num_experts: int, generator: torch.Generator
) -> torch.Tensor:
    if name.endswith("tid2eid"):
        ranks = torch.rand(slot.shape[0], num_experts, generator=generator).argsort(-1)
        chosen: torch.Tensor = ranks[:, : slot.shape[1]].contiguous()
        return chosen
    values = torch.randn(slot.shape, generator=generator)
    if "norm.weight" in name:
        return 1 + 0.2 * values
    if name.endswith("_scale"):
        return 0.7 + 0.2 * values
    if name.endswith(".gate.bias"):
        return 0.2 * values
    if name.endswith((".ape", ".attn_sink", "_base")) or name.startswith("embed"):
        return values
    values *= 1.3 / math.sqrt(slot.shape[-1])
    return values


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Write config.json and the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, str(folder / "model.safetensors"))
