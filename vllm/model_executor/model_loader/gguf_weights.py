"""Weights of a GGUF file: its tensors by the names that models ask for, blocks packed into panels.

What conversion to GGUF changed is undone: here the gate and up matrices of gpt-oss, which releases
interleave, and the rest in ``gguf_conversion``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from typing_extensions import override

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.model_executor.layers.quantization.code_layouts import check_whole_scale
from vllm.model_executor.layers.quantization.gguf_blocks import (
    BLOCK_FORMS,
    BlockPacker,
    kept_bytes,
    read_blocks,
    scale_whole,
)
from vllm.model_executor.layers.quantization.interface import ExpertsSpec, MatrixSpec, RowDecoder
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import CodedRows, PackedRows, allocate
from vllm.model_executor.layers.quantization.storages import Storage
from vllm.model_executor.layers.quantization.stored_matrix import StoredExperts
from vllm.model_executor.model_loader.gguf_conversion import Conversion
from vllm.model_executor.model_loader.gguf_names import Entry, decode_blocks, read_entries
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages
from vllm.model_executor.model_loader.packed_copies import fingerprint
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.utils.gguf_file import BlockType, GgufTensor, find_parts, read_gguf
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op
from vllm.v1.attention.ops.stored import Inputs
from vllm.version import __version__

# What NVFP4 matrices are multiplied by: a number, of stacked experts one each.
_WHOLE_SCALE = ".scale"
# The type of rows of blocks as they lie in a file.
_BLOCKS = "U8"
# One matrix of alternating rows, and the two that files have.
_GATE_AND_UP, _HALVES = ".gate_up_proj", ("gate_proj", "up_proj")
# Raised when other rows or columns are made of the same blocks: copies of packed matrices name it,
# and tests/model_executor/model_loader/test_gguf_weights.py holds digests of what is made.
_CONVERSION = 1
# Blocks that show how a type is packed: rows of more than a panel.
_SAMPLE_ROWS, _SAMPLE_BLOCKS = 65, 4
_SCATTER, _SCATTER_SHIFT = 2_654_435_761, 13


def read_gguf_tensors(path: str | Path, drafts: str | Path | None = None) -> list[StoredTensor]:
    """Return a file's tensors by the names of the family's releases, experts one by one.

    Blocks are rows of bytes (U8); plain values have safetensors' names of their types.

    Args:
        path: The file.
        drafts: The file of a block that drafts, if it has one of its own.

    Raises:
        CheckpointError: A file is broken.
        UnsupportedFeatureError: A tensor's type is not served.
    """
    return [stored for _, stored in _read_both(path, drafts)]


def _read_both(path: str | Path, drafts: str | Path | None) -> Iterator[Entry]:
    return read_entries(read_gguf(path), None if drafts is None else read_gguf(drafts))


class GgufWeights(MatrixStorages):
    """A ``WeightQuantization`` of one GGUF file.

    Args:
        path: The file, or the first part of it.
        drafts: The file of a block that drafts, if it has one of its own.
        inputs: What the inputs of coded matrices are rounded to.
        ops: Resolves op names.
        pack: What packs blocks as they are; None: torch does.
    """

    def __init__(
        self,
        path: str | Path,
        drafts: str | Path | None = None,
        *,
        inputs: Inputs = "whole",
        ops: OpResolver = get_reference_op,
        pack: BlockPacker | None = None,
    ) -> None:
        super().__init__(ops)
        self._pack = pack
        self._inputs: Inputs = inputs
        self._conversion = Conversion(read_gguf(path))
        self._files = frozenset(find_parts(Path(path)))
        self._tensors = {entry[1].name: entry for entry in _read_both(path, drafts)}

    def describe_types(self) -> str:
        """Return the types of the matrices by their shares of the bytes, largest first.

        With what all take in the file and, kept as panels, in memory.
        """
        sizes: dict[str, int] = {}
        for tensor, stored in self._tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + stored.num_bytes
        total = max(1, sum(sizes.values()))
        shares = sorted(sizes.items(), key=lambda item: -item[1])
        kept = sum(kept_bytes(name, size) for name, size in sizes.items())
        parts = ", ".join(f"{name} {100 * size / total:.0f}%" for name, size in shares)
        return f"{parts}; {total / 1e9:.2f} GB in the file, {kept / 1e9:.2f} GB in memory"

    def is_of_drafts(self, name: str) -> bool:
        """Whether a matrix's values are those of the drafts' own file."""
        names = [name]
        if name.endswith(_GATE_AND_UP):
            # One matrix of two that files keep apart.
            stem = name.removesuffix(_GATE_AND_UP)
            names = [f"{stem}.{leaf}" for leaf in _HALVES]
        found = [entry for each in names if (entry := self._tensors.get(f"{each}.weight"))]
        return any(tensor.file not in self._files for tensor, _ in found)

    def fingerprint_packing(self) -> str:
        """Return what differs where any type is packed otherwise, as panels are made.

        Fixed blocks of each type are packed for that, whatever the file has: starts with and
        without a file of drafts share the copy of the model.
        """
        packed = []
        for name in sorted(BLOCK_FORMS):
            row_bytes = _SAMPLE_BLOCKS * BLOCK_FORMS[name].num_bytes
            sample = torch.arange(_SAMPLE_ROWS * row_bytes) * _SCATTER >> _SCATTER_SHIFT
            # Bytes below 64: no half of them is infinite.
            blocks = (sample & 63).to(torch.uint8).view(_SAMPLE_ROWS, row_bytes)
            packed.append((name, PackedRows(read_blocks(name, blocks, self._pack), name)))
        return f"{_CONVERSION}.{__version__}.{fingerprint(packed)}"

    def _find_storage(self, spec: MatrixSpec) -> Storage | None:
        name, in_size, out_size = spec.name, spec.in_size, spec.out_size
        if name.endswith(_GATE_AND_UP):
            return self._make_interleaved(spec)
        entry = self._tensors.get(f"{name}.weight")
        # Plain ones come in the release's order already.
        if entry is None or entry[1].dtype != _BLOCKS:
            return None
        tensor, stored = entry
        rows_of = self._conversion.row_order(name, out_size)
        columns_of = self._conversion.column_order(name)
        raw = {".weight": _empty_blocks(tensor, stored, in_size, out_size, spec.device)}
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
        stem = spec.name.removesuffix(_GATE_AND_UP)
        entries = [self._tensors.get(f"{stem}.{leaf}.weight") for leaf in _HALVES]
        found = [entry for entry in entries if entry is not None]
        types = {tensor.type.name for tensor, _ in found}
        are_blocks = all(stored.dtype == _BLOCKS for _, stored in found)
        if not found:
            return None
        if len(found) != 2 or len(types) != 1 or not are_blocks:
            raise UnsupportedFeatureError(
                f"{found[0][0].file}: gate and up of {stem} are stored as "
                f"{', '.join(sorted(types))}: both must be in blocks of one type, as MXFP4 or "
                "Q8_0, to be served."
            )
        raw = {}
        for leaf, (tensor, stored) in zip(_HALVES, found, strict=True):
            blocks = _empty_blocks(tensor, stored, spec.in_size, spec.out_size // 2, spec.device)
            raw[f".{leaf}.weight"] = blocks
        (type_name,) = types

        def convert(filled: Mapping[str, torch.Tensor]) -> CodedRows:
            pairs = torch.stack(list(filled.values()), 1)
            return read_blocks(type_name, pairs.flatten(0, 1), self._pack)

        return _SiblingStorage(spec.out_size, spec.in_size, raw, convert, self._inputs)

    def make_experts(self, spec: ExpertsSpec) -> StoredExperts | None:
        """See ``WeightQuantization``: where any of them is stored in blocks."""
        own = (
            stored for name, (_, stored) in self._tensors.items() if name.startswith(spec.prefix)
        )
        return self._make_experts(spec) if any(each.dtype == _BLOCKS for each in own) else None

    @override
    def find_row_decoder(self, name: str, width: int) -> RowDecoder | None:
        entry = self._tensors.get(name)
        if entry is None or entry[1].dtype != _BLOCKS:
            return None
        tensor, _ = entry
        return _BlockRows(tensor.type, name, _count_row_bytes(tensor, width))

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return any(name.startswith(prefix) for name in self._tensors)

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """See ``WeightQuantization``: plain bf16 matrices stay as stored."""
        types = {self._tensors[name][1].dtype for name in names if name in self._tensors}
        return torch.bfloat16 if types == {"BF16"} else None


class _SiblingStorage(PackingStorage):
    """Filled from two tensors that stand beside the name of the matrix they make."""

    @override
    def slots(self, name: str) -> dict[str, torch.Tensor]:
        return super().slots(name.rpartition(".")[0])


class _BlockRows:
    """A ``RowDecoder`` of rows of blocks."""

    def __init__(self, block: BlockType, name: str, row_bytes: int) -> None:
        self._block, self._name, self.row_bytes = block, name, row_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``RowDecoder``."""
        return decode_blocks(self._block.name, rows, self._name)


def _empty_blocks(
    tensor: GgufTensor, stored: StoredTensor, in_size: int, out_size: int, device: torch.device
) -> torch.Tensor:
    row_bytes = _count_row_bytes(tensor, in_size)
    # Before memory is asked for: keys may say anything.
    if stored.shape != (out_size, row_bytes):
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} has the sizes {list(tensor.shape)}, but its keys "
            f"describe a model that needs {out_size} rows of {in_size} for {stored.name}."
        )
    return allocate((out_size, row_bytes), torch.uint8, device)


def _count_row_bytes(tensor: GgufTensor, in_size: int) -> int:
    block = tensor.type
    if in_size % block.size:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} ({block.name}) has rows of {tensor.shape[-1]} "
            f"values, but the model that its keys describe needs {in_size}."
        )
    return in_size // block.size * block.num_bytes
