"""Weights of a GGUF file: its tensors by the names that models ask for, blocks packed into panels.

Names are those of the families' releases. What conversion to GGUF changed is undone: rows of
Llama's queries and keys, which lie in pairs that are turned together, and gpt-oss's gate and up
matrices, which releases interleave.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_READERS, read_blocks
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import CodedRows
from vllm.model_executor.layers.quantization.storages import PlainRows, Storage
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.utils.gguf_file import GgufTensor, read_gguf

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PART = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA3_PART = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS_PART = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_BY_ARCHITECTURE = {"gemma3": _GEMMA3_PART, "gpt-oss": _GPT_OSS_PART}
_EXPERT_PART = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SINKS = re.compile(r"blk\.(\d+)\.attn_sinks(\.weight)?")
_PAIRED = re.compile(r".+\.self_attn\.([qk])_proj")
# Numbers that follow from config.json, or were read with it.
_LEFT_OUT = ("rope_freqs.weight",)


def read_gguf_tensors(path: str | Path) -> list[StoredTensor]:
    """Return a file's tensors by the names of the family's releases, experts one by one.

    Blocks are rows of bytes (U8); plain values have safetensors' names of their types.

    Raises:
        CheckpointError: The file is broken.
        UnsupportedFeatureError: A tensor's type is not served.
    """
    file = read_gguf(path)
    architecture = str(file.keys.get("general.architecture"))
    stored: list[StoredTensor] = []
    for tensor in file.tensors.values():
        if tensor.name not in _LEFT_OUT:
            stored += _translate(tensor, architecture)
    return stored


def _translate(tensor: GgufTensor, architecture: str) -> list[StoredTensor]:
    name = _find_name(tensor.name, architecture)
    match = _BLOCK.fullmatch(tensor.name)
    if match is None or match[2] not in _EXPERT_PART:
        return [_describe(tensor, name, tensor.shape, tensor.offset, tensor.num_bytes)]
    prefix, leaf = f"model.layers.{match[1]}.mlp.experts", _EXPERT_PART[match[2]]
    if match[3] == "bias":
        name = f"{prefix}.{leaf}_bias"
        return [_describe(tensor, name, tensor.shape, tensor.offset, tensor.num_bytes)]
    if len(tensor.shape) != 3 or not tensor.shape[0]:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} has the sizes {list(tensor.shape)}, not those of "
            "[experts, rows, columns]."
        )
    each = tensor.num_bytes // tensor.shape[0]
    return [
        _describe(
            tensor, f"{prefix}.{e}.{leaf}.weight", tensor.shape[1:], tensor.offset + e * each, each
        )
        for e in range(tensor.shape[0])
    ]


def _find_name(name: str, architecture: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    if match := _SINKS.fullmatch(name):
        return f"model.layers.{match[1]}.self_attn.sinks"
    if match := _BLOCK.fullmatch(name):
        part = {**_PART, **_BY_ARCHITECTURE.get(architecture, {})}.get(match[2])
        if part is not None:
            return f"model.layers.{match[1]}.{part}.{match[3]}"
    # The loader reports it by this name.
    return name


def _describe(
    tensor: GgufTensor, name: str, shape: tuple[int, ...], offset: int, num_bytes: int
) -> StoredTensor:
    if tensor.type.size == 1:
        return StoredTensor(name, shape, tensor.type.name, tensor.file, offset, num_bytes)
    row_bytes = shape[-1] // tensor.type.size * tensor.type.num_bytes
    return StoredTensor(name, (*shape[:-1], row_bytes), "U8", tensor.file, offset, num_bytes)


class GgufWeights(MatrixStorages):
    """A ``WeightQuantization`` of one GGUF file.

    Args:
        path: The file, or the first part of it.
        head_dim: Width of a head, for the rows of queries and keys.
    """

    def __init__(self, path: str | Path, head_dim: int) -> None:
        super().__init__()
        file = read_gguf(path)
        self._head_dim = head_dim
        architecture = str(file.keys.get("general.architecture"))
        self._has_pairs = architecture == "llama"
        self._tensors: dict[str, tuple[GgufTensor, StoredTensor]] = {}
        for tensor in file.tensors.values():
            if tensor.name not in _LEFT_OUT:
                for stored in _translate(tensor, architecture):
                    self._tensors[stored.name] = (tensor, stored)

    def describe_types(self) -> str:
        """Return the types of the matrices by their shares of the bytes, largest first."""
        sizes: dict[str, int] = {}
        for tensor, stored in self._tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + stored.num_bytes
        total = max(1, sum(sizes.values()))
        shares = sorted(sizes.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {100 * size / total:.0f}%" for name, size in shares)

    def _find_storage(
        self, name: str, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device
    ) -> Storage | None:
        if name.endswith(".gate_up_proj"):
            return self._make_interleaved(name, in_size, out_size, device)
        entry = self._tensors.get(f"{name}.weight")
        if entry is None:
            return None
        tensor, _ = entry
        order = self._find_order(name, out_size)
        if tensor.type.name not in BLOCK_READERS:
            if order is None:
                return None
            kept = torch.bfloat16 if tensor.type.name == "BF16" else dtype
            weight = torch.empty((out_size, in_size), dtype=kept, device=device)
            return _ReorderedRows(weight, order)
        raw = {".weight": _empty_blocks(tensor, in_size, out_size, device)}

        def convert(filled: Mapping[str, torch.Tensor]) -> CodedRows:
            rows = read_blocks(tensor.type.name, filled[".weight"])
            return rows if order is None else rows.take_rows(order)

        return PackingStorage(out_size, in_size, raw, convert)

    def _find_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Returns which stored row each row of a release is; None: the one of its number.

        Llama's queries and keys lie in pairs: row 2i of a head is its i-th, 2i + 1 its i-th of the
        second half.
        """
        if not self._has_pairs or _PAIRED.fullmatch(name) is None:
            return None
        stored = torch.arange(num_rows).view(-1, self._head_dim // 2, 2)
        return stored.transpose(1, 2).reshape(-1)

    def _make_interleaved(
        self, name: str, in_size: int, out_size: int, device: torch.device
    ) -> Storage | None:
        """Makes gate and up as one matrix of alternating rows, as gpt-oss's releases have them."""
        stem = name.removesuffix(".gate_up_proj")
        entries = [self._tensors.get(f"{stem}.{leaf}.weight") for leaf in ("gate_proj", "up_proj")]
        found = [entry for entry in entries if entry is not None]
        types = {tensor.type.name for tensor, _ in found}
        if len(found) != 2 or len(types) != 1 or not types & set(BLOCK_READERS):
            return None
        raw = {}
        for leaf, (tensor, _) in zip(("gate_proj", "up_proj"), found, strict=True):
            blocks = _empty_blocks(tensor, in_size, out_size // 2, device)
            raw[f".{leaf}.weight"] = blocks
        (type_name,) = types

        def convert(filled: Mapping[str, torch.Tensor]) -> CodedRows:
            pairs = torch.stack(list(filled.values()), 1)
            return read_blocks(type_name, pairs.flatten(0, 1))

        return _SiblingStorage(out_size, in_size, raw, convert)

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return any(name.startswith(prefix) for name in self._tensors)

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """See ``WeightQuantization``: plain bf16 matrices stay as stored."""
        types = {self._tensors[name][0].type.name for name in names if name in self._tensors}
        return torch.bfloat16 if types == {"BF16"} else None


class _SiblingStorage(PackingStorage):
    """Filled from two tensors that stand beside the name of the matrix they make."""

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """See ``Storage``."""
        return super().slots(name.rpartition(".")[0])


class _ReorderedRows(PlainRows):
    """Plain rows that lie in another order in the file."""

    def __init__(self, weight: torch.Tensor, order: torch.Tensor) -> None:
        super().__init__(weight)
        self._order = order

    def check(self, name: str) -> None:
        """See ``Storage``; puts the rows in order."""
        del name
        self.weight.copy_(self.weight[self._order])


def _empty_blocks(
    tensor: GgufTensor, in_size: int, out_size: int, device: torch.device
) -> torch.Tensor:
    block = tensor.type
    if in_size % block.size:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} ({block.name}) has rows of {tensor.shape[-1]} "
            f"values, but the model that its keys describe needs {in_size}."
        )
    row_bytes = in_size // block.size * block.num_bytes
    return torch.empty((out_size, row_bytes), dtype=torch.uint8, device=device)
