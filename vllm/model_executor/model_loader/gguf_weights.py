"""Weights of a GGUF file: its tensors by the names that models ask for, blocks packed into panels.

Names are those of the families' releases. What conversion to GGUF changed is undone: here the gate
and up matrices of gpt-oss, which releases interleave, and the rest in ``gguf_conversion``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.code_layouts import check_whole_scale
from vllm.model_executor.layers.quantization.gguf_blocks import (
    BLOCK_FORMS,
    BlockPacker,
    kept_block_bytes,
    read_blocks,
    scale_whole,
)
from vllm.model_executor.layers.quantization.interface import MatrixSpec, RowDecoder
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import CodedRows, PackedRows, allocate
from vllm.model_executor.layers.quantization.storages import Storage
from vllm.model_executor.model_loader.gguf_config import count_layers
from vllm.model_executor.model_loader.gguf_conversion import Conversion
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.utils.gguf_file import BlockType, GgufFile, GgufTensor, read_gguf
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op
from vllm.v1.attention.ops.stored import Inputs

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
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
_GEMMA4_PART = {
    **_GEMMA3_PART,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
# Vectors whose names end otherwise than those of matrices.
_GEMMA4_VECTORS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_QWEN35_PART = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN35_VECTORS = {"ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log"}
_GPT_OSS_PART = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_BY_ARCHITECTURE = {
    "gemma3": _GEMMA3_PART,
    "gemma4": _GEMMA4_PART,
    "gpt-oss": _GPT_OSS_PART,
    "qwen35": _QWEN35_PART,
    "qwen35moe": _QWEN35_PART,
}
_GPT_OSS_VECTORS = {"attn_sinks": "self_attn.sinks", "attn_sinks.weight": "self_attn.sinks"}
_VECTORS = {
    "gemma4": _GEMMA4_VECTORS,
    "gpt-oss": _GPT_OSS_VECTORS,
    "qwen35": _QWEN35_VECTORS,
    "qwen35moe": _QWEN35_VECTORS,
}
# Where a layer's experts are, other than in its MLP.
_EXPERTS = {"gemma4": "experts"}
_EXPERT_PART = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
# Both matrices of each expert, one after the other.
_FUSED_EXPERTS = "ffn_gate_up_exps"
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|scale)")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
# Numbers that follow from config.json, or were read with it.
_LEFT_OUT = ("rope_freqs.weight",)
# What NVFP4 releases would round inputs of products by: they are taken as they are.
_INPUT_SCALE = ".input_scale"
# What NVFP4 matrices are multiplied by: a number, of stacked experts one each.
_WHOLE_SCALE = ".scale"


def read_gguf_tensors(path: str | Path) -> list[StoredTensor]:
    """Return a file's tensors by the names of the family's releases, experts one by one.

    Blocks are rows of bytes (U8); plain values have safetensors' names of their types.

    Raises:
        CheckpointError: The file is broken.
        UnsupportedFeatureError: A tensor's type is not served.
    """
    return [stored for _, stored in _read_all(read_gguf(path))]


def _read_all(file: GgufFile) -> Iterator[tuple[GgufTensor, StoredTensor]]:
    """Yields what the model asks for, each with the tensor of the file that holds it."""
    conversion = Conversion(file)
    num_layers = count_layers(file)
    for tensor in file.tensors.values():
        match = _IN_BLOCK.fullmatch(tensor.name)
        # Blocks behind the layers draft tokens, and are not run.
        is_left_out = tensor.name in _LEFT_OUT or tensor.name.endswith(_INPUT_SCALE)
        if not is_left_out and (match is None or int(match[1]) < num_layers):
            for stored in _translate(tensor, conversion):
                yield tensor, stored


def _translate(tensor: GgufTensor, conversion: Conversion) -> list[StoredTensor]:
    architecture = conversion.architecture
    match = _BLOCK.fullmatch(tensor.name)
    leaves: tuple[str, ...] = ()
    if match is not None and f"{match[2]}.{match[3]}" not in _VECTORS.get(architecture, {}):
        is_fused = match[2] == _FUSED_EXPERTS and match[3] != "bias"
        fused = ("gate_proj", "up_proj") if is_fused else ()
        leaves = fused or ((_EXPERT_PART[match[2]],) if match[2] in _EXPERT_PART else ())
    if match is None or not leaves:
        name = _find_name(tensor.name, architecture)
        stored = _describe(tensor, name, tensor.shape, tensor.offset, tensor.num_bytes)
        if stored.dtype == "U8":
            return [stored]
        shape = conversion.find_shape(name, stored.shape)
        return [replace(stored, shape=shape, undo=conversion.find_undo(name, shape[0]))]
    prefix = f"model.layers.{match[1]}.{_EXPERTS.get(architecture, 'mlp.experts')}"
    if match[3] == "scale" and tensor.type.name == "F32":
        return [
            StoredTensor(f"{prefix}.{e}.{leaf}.scale", (1,), "F32", tensor.file, offset, 4)
            for e, offset in enumerate(range(tensor.offset, tensor.offset + tensor.num_bytes, 4))
            for leaf in leaves
        ]
    if match[3] == "bias":
        name = f"{prefix}.{leaves[0]}_bias"
        return [_describe(tensor, name, tensor.shape, tensor.offset, tensor.num_bytes)]
    if len(tensor.shape) != 3 or not tensor.shape[0] or tensor.shape[1] % len(leaves):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} has the sizes {list(tensor.shape)}, not those of "
            "[experts, rows, columns]."
        )
    num_rows = tensor.shape[1] // len(leaves)
    each = tensor.num_bytes // tensor.shape[0] // len(leaves)
    return [
        _describe(
            tensor,
            f"{prefix}.{e}.{leaf}.weight",
            (num_rows, tensor.shape[2]),
            tensor.offset + (e * len(leaves) + part) * each,
            each,
        )
        for e in range(tensor.shape[0])
        for part, leaf in enumerate(leaves)
    ]


def _find_name(name: str, architecture: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    if match := _IN_BLOCK.fullmatch(name):
        vector = _VECTORS.get(architecture, {}).get(match[2])
        if vector is not None:
            return f"model.layers.{match[1]}.{vector}"
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
        rounds_inputs: Whether the inputs of coded matrices are rounded to eight bits by group.
        ops: Resolves op names.
        pack: What packs blocks as they are; None: torch does.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rounds_inputs: bool = False,
        ops: OpResolver = get_reference_op,
        pack: BlockPacker | None = None,
    ) -> None:
        super().__init__(ops)
        self._pack = pack
        self._inputs: Inputs = "bytes by group" if rounds_inputs else "whole"
        file = read_gguf(path)
        self._conversion = Conversion(file)
        self._tensors = {stored.name: (tensor, stored) for tensor, stored in _read_all(file)}

    def describe_types(self) -> str:
        """Return the types of the matrices by their shares of the bytes, largest first.

        With what all take in the file and, kept as panels, in memory.
        """
        sizes: dict[str, int] = {}
        for tensor, stored in self._tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + stored.num_bytes
        total = max(1, sum(sizes.values()))
        shares = sorted(sizes.items(), key=lambda item: -item[1])
        kept = sum(size * _growth(tensor_type) for tensor_type, size in sizes.items())
        parts = ", ".join(f"{name} {100 * size / total:.0f}%" for name, size in shares)
        return f"{parts}; {total / 1e9:.2f} GB in the file, {kept / 1e9:.2f} GB in memory"

    def _find_storage(self, spec: MatrixSpec) -> Storage | None:
        name, in_size, out_size = spec.name, spec.in_size, spec.out_size
        if name.endswith(".gate_up_proj"):
            return self._make_interleaved(spec)
        entry = self._tensors.get(f"{name}.weight")
        if entry is None:
            return None
        tensor, _ = entry
        # Plain ones come in the release's order already.
        if tensor.type.name not in BLOCK_FORMS:
            return None
        rows_of = self._conversion.row_order(name, out_size)
        columns_of = self._conversion.column_order(name)
        raw = {".weight": _empty_blocks(tensor, in_size, out_size, spec.device)}
        if tensor.type.name == "NVFP4" and f"{name}{_WHOLE_SCALE}" in self._tensors:
            raw[_WHOLE_SCALE] = torch.empty(1, device=spec.device)

        def convert(filled: Mapping[str, torch.Tensor]) -> CodedRows:
            rows = read_blocks(tensor.type.name, filled[".weight"], self._pack)
            if _WHOLE_SCALE in filled:
                whole = filled[_WHOLE_SCALE]
                check_whole_scale(name, (_WHOLE_SCALE, whole), divides=False)
                rows = scale_whole(rows, whole)
            if rows_of is not None:
                rows = rows.take_rows(rows_of)
            if columns_of is not None:
                # Blocks along a row cannot be parted: the inputs are put in their order.
                rows = replace(rows, order=columns_of.argsort().int())
            return rows

        return PackingStorage(out_size, in_size, raw, convert, self._inputs)

    def _make_interleaved(self, spec: MatrixSpec) -> Storage | None:
        """Makes gate and up as one matrix of alternating rows, as gpt-oss's releases have them."""
        stem = spec.name.removesuffix(".gate_up_proj")
        entries = [self._tensors.get(f"{stem}.{leaf}.weight") for leaf in ("gate_proj", "up_proj")]
        found = [entry for entry in entries if entry is not None]
        types = {tensor.type.name for tensor, _ in found}
        if len(found) != 2 or len(types) != 1 or not types & set(BLOCK_FORMS):
            return None
        raw = {}
        for leaf, (tensor, _) in zip(("gate_proj", "up_proj"), found, strict=True):
            blocks = _empty_blocks(tensor, spec.in_size, spec.out_size // 2, spec.device)
            raw[f".{leaf}.weight"] = blocks
        (type_name,) = types

        def convert(filled: Mapping[str, torch.Tensor]) -> CodedRows:
            pairs = torch.stack(list(filled.values()), 1)
            return read_blocks(type_name, pairs.flatten(0, 1), self._pack)

        return _SiblingStorage(spec.out_size, spec.in_size, raw, convert, self._inputs)

    def find_row_decoder(self, name: str, width: int) -> RowDecoder | None:
        """See ``WeightQuantization``."""
        entry = self._tensors.get(name)
        if entry is None or entry[0].type.name not in BLOCK_FORMS:
            return None
        tensor, _ = entry
        return _BlockRows(tensor.type, name, _count_row_bytes(tensor, width))

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return any(name.startswith(prefix) for name in self._tensors)

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """See ``WeightQuantization``: plain bf16 matrices stay as stored."""
        types = {self._tensors[name][0].type.name for name in names if name in self._tensors}
        return torch.bfloat16 if types == {"BF16"} else None


def _growth(type_name: str) -> float:
    """Returns how many bytes of memory a byte of the file takes."""
    if type_name in BLOCK_FORMS:
        return kept_block_bytes(type_name) / BLOCK_FORMS[type_name].num_bytes
    return 2.0 if type_name == "F16" else 1.0


class _SiblingStorage(PackingStorage):
    """Filled from two tensors that stand beside the name of the matrix they make."""

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        """See ``Storage``."""
        return super().slots(name.rpartition(".")[0])


class _BlockRows:
    """A ``RowDecoder`` of rows of blocks."""

    def __init__(self, block: BlockType, name: str, row_bytes: int) -> None:
        self._block, self._name, self.row_bytes = block, name, row_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``RowDecoder``."""
        packed = PackedRows(read_blocks(self._block.name, rows), self._name)
        values = torch.empty(packed.num_rows, packed.num_columns)
        packed.write_rows(0, values)
        return values


def _empty_blocks(
    tensor: GgufTensor, in_size: int, out_size: int, device: torch.device
) -> torch.Tensor:
    row_bytes = _count_row_bytes(tensor, in_size)
    return allocate((out_size, row_bytes), torch.uint8, device)


def _count_row_bytes(tensor: GgufTensor, in_size: int) -> int:
    block = tensor.type
    if in_size % block.size:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} ({block.name}) has rows of {tensor.shape[-1]} "
            f"values, but the model that its keys describe needs {in_size}."
        )
    return in_size // block.size * block.num_bytes
