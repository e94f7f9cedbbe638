"""DeepSeek-V4's and V4.1's published spelling: which tensor is stored in which type, and files."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm.exceptions import ConfigError
from vllm.model_executor.layers.quantization.encode import encode_fp4_groups, encode_fp8_blocks

_ROUTED_EXPERT = re.compile(r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.weight")
_FP8_MATRIX = re.compile(
    r"(layers|mtp)\.\d+\.("
    r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|[eh]_proj|"
    r"engram\.wkv"
    r")\.weight"
)
# Rows are looked up one by one, so each has scales of its own.
_TABLE = re.compile(r"layers\.\d+\.engram\.embed\.weight")
_TABLE_BLOCK = (1, 32)
_FP32_LEAVES = ("attn_sink", "ape", "gate.bias", "_fn", "_base", "_scale")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How matrices are stored.

    Attributes:
        expert_dtype: Of routed experts: "fp4" or "fp8".
        group_size: Columns of a group of FP4.
        block_shape: Rows and columns of a block of FP8.
        float_scales: FP8's scales are fp32 (the Base releases) instead of e8m0.
        fp4_codes: The type the bytes of FP4 come as: int8 (the releases) or uint8.
    """

    expert_dtype: str = "fp4"
    group_size: int = 32
    block_shape: tuple[int, int] = (128, 128)
    float_scales: bool = False
    fp4_codes: torch.dtype = torch.int8

    def __post_init__(self) -> None:
        if self.expert_dtype not in ("fp4", "fp8"):
            raise ConfigError(f"expert_dtype={self.expert_dtype!r} is unknown: use fp4 or fp8.")
        if self.group_size < 1 or min(self.block_shape) < 1:
            raise ConfigError(
                f"group_size={self.group_size} and block_shape={self.block_shape} must be positive."
            )

    def spell(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a float tensor of a published name as the tensors that are stored for it.

        Routing tables stay integers.
        """
        if not tensor.is_floating_point():
            return {name: tensor.contiguous()}
        matrix = name.removesuffix(".weight")
        if _ROUTED_EXPERT.fullmatch(name) and self.expert_dtype == "fp4":
            codes, scales = encode_fp4_groups(tensor, self.group_size)
            return {name: codes.view(self.fp4_codes), f"{matrix}.scale": scales}
        is_table = _TABLE.fullmatch(name) is not None
        if is_table or _ROUTED_EXPERT.fullmatch(name) or _FP8_MATRIX.fullmatch(name):
            fp8, scales = encode_fp8_blocks(
                tensor,
                _TABLE_BLOCK if is_table else self.block_shape,
                float_scales=self.float_scales and not is_table,
            )
            return {name: fp8, f"{matrix}.scale": scales}
        wanted = torch.float32 if name.endswith(_FP32_LEAVES) else torch.bfloat16
        return {name: tensor.to(wanted).contiguous()}

    def config_fields(self) -> dict[str, Any]:
        """Return what a config.json says about the spelling."""
        return {
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "fp32" if self.float_scales else "ue8m0",
                "weight_block_size": list(self.block_shape),
            },
            "expert_dtype": self.expert_dtype,
        }


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, max_shard_bytes: int
) -> int:
    """Write tensors, as they come, into safetensors files of a folder.

    One file is ``model.safetensors``; several are numbered and have an index. No more than a
    shard is held in memory.

    Returns:
        The bytes of all tensors.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for shard in _cut_into_shards(tensors, max_shard_bytes):
        part = out / f"part-{len(parts)}.tmp"
        save_file(shard, part, metadata={"format": "pt"})
        parts.append((part, list(shard)))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(parts) == 1:
        parts[0][0].rename(out / "model.safetensors")
        return total_bytes
    weight_map: dict[str, str] = {}
    for number, (part, names) in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        part.rename(out / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total_bytes


def write_config(config: Mapping[str, Any], out: Path) -> None:
    """Write a ``config.json``."""
    text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")


def _cut_into_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard:
        yield shard
