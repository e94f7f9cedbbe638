"""A model that is nothing but slots, shaped like a small DeepSeek-V4."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.checkpoints.deepseek_v4_tensors import tensor_specs
from tools.checkpoints.make_deepseek_v4 import CONFIG
from vllm.model_executor.model_loader.weight_names import TensorPart, published_parts

TINY: dict[str, Any] = CONFIG | {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 8,
    "o_lora_rank": 4,
    "compress_ratios": [0, 4, 128, 0],
    "index_n_heads": 2,
    "index_head_dim": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 6,
    "vocab_size": 12,
    "num_hash_layers": 1,
}


class FakeModel:
    """Slots of every tensor of a config; NaN, or -1, until they are filled."""

    def __init__(self, config: dict[str, Any] = TINY, dtype: torch.dtype = torch.float32) -> None:
        self.slots: dict[str, Tensor] = {}
        for name, spec in tensor_specs(config).items():
            is_table = spec.dtype == "I64"
            fill = -1 if is_table else float("nan")
            self.slots[name] = torch.full(
                spec.shape, fill, dtype=torch.int64 if is_table else dtype
            )

        has_mtp = config["num_nextn_predict_layers"] > 0
        self.optional_weight_prefixes: tuple[str, ...] = ("mtp.",)
        self.ignored_weight_prefixes: tuple[str, ...] = () if has_mtp else ("mtp.",)

    def tensor_parts(self, name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
        """As DeepSeek-V4's."""
        return published_parts(name, shape)

    def weight_slots(self) -> dict[str, Tensor]:
        return self.slots


def random_tensors(config: dict[str, Any] = TINY, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in tensor_specs(config).items():
        if spec.dtype == "I64":
            high = config["n_routed_experts"]
            tensors[name] = torch.randint(0, high, spec.shape, generator=generator)
        else:
            tensors[name] = torch.randn(spec.shape, generator=generator)
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    return folder
