"""A GGUF file's tensors by the names that models ask for: those of the families' releases.

A tensor may be several there (stacked experts), a part of one, or made of several; blocks of what
models keep as numbers are decoded as they are read.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.gguf_blocks import read_blocks
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.model_executor.model_loader.gguf_architectures import Architecture, Cut, find_architecture
from vllm.model_executor.model_loader.gguf_config import check_drafts, count_layers, find_keys
from vllm.model_executor.model_loader.gguf_conversion import Conversion
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.utils.gguf_file import GgufFile, GgufTensor

Entry = tuple[GgufTensor, StoredTensor]
"""What the model asks for, with the tensor of the file that holds it, or the first of several."""

_STACKS = {"ffn_gate_exps": (1,), "ffn_up_exps": (2,), "ffn_down_exps": (3,)}
# Both matrices of each expert, one after the other.
_FUSED_STACK, _BOTH = "ffn_gate_up_exps", (1, 2)
_IN_BLOCK = re.compile(r"(?:blk\.(\d+)|mtp\.0)\.(.+)")
# Half of a matrix by head each.
_KEY_MAPS, _VALUE_MAPS = "attn_k_b.weight", "attn_v_b.weight"
# Part of the names of what mixes residual streams, whose tensors have no ends in releases.
_HYPER = "hc_"
_PAIR = "nextn.eh_proj.weight"
# Copies of the model's own embedding and head, which the block that drafts shares.
_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
_LEFT_OUT = (
    # Numbers that follow from config.json, or were read with it.
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    # What makes vectors of the model's rows is read by whoever does that.
    "dense_2.weight",
    "dense_3.weight",
    # Rows of the output matrix, which is there, for a reranker's two answers.
    "cls.output.weight",
)
# What NVFP4 releases would round inputs of products by: they are taken as they are.
_INPUT_SCALE = ".input_scale"
# Matrices that models keep as numbers, however they are stored.
_NUMBERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")


def read_entries(file: GgufFile, drafts: GgufFile | None = None) -> Iterator[Entry]:
    """Yield a file's tensors, and those of a block that drafts from a file of its own.

    Raises:
        CheckpointError: A stack of experts is none, or the second file does not fit the first.
        UnsupportedModelError: The architecture is not served.
    """
    yield from _Names(file).read()
    if drafts is not None:
        check_drafts(file, drafts)
        yield from _Names(drafts).read_drafts()


class _Names:
    """The names of one file's tensors."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._own: Architecture = find_architecture(file)
        self._conversion = Conversion(file)
        self._num_layers = count_layers(file)

    def read(self) -> Iterator[Entry]:
        """Yields all that the model asks for."""
        for tensor in self._file.tensors.values():
            if tensor.name in _LEFT_OUT or tensor.name.endswith(_INPUT_SCALE):
                continue
            match = _IN_BLOCK.fullmatch(tensor.name)
            if match is None:
                name = self._find_top(tensor.name)
                yield self._take(tensor, name, is_numbers=_HYPER in name)
            elif match[1] is not None and int(match[1]) < self._num_layers:
                yield from self._read_block(tensor, f"{self._own.layer}.{match[1]}", match[2])
            else:
                yield from self._read_draft_block(tensor, match)

    def read_drafts(self) -> Iterator[Entry]:
        """Yields what a file of a block that drafts adds to the model's own."""
        drafts = self._own.drafts
        assert drafts is not None, "check_drafts comes first"
        for tensor in self._file.tensors.values():
            if (match := _IN_BLOCK.fullmatch(tensor.name)) is not None:
                yield from self._read_draft_block(tensor, match)
            elif tensor.name in drafts.top:
                yield self._take(tensor, drafts.top[tensor.name], is_numbers=True)

    def _find_top(self, name: str) -> str:
        stem, _, leaf = name.rpartition(".")
        ours = self._own.top.get(stem)
        # The loader reports others by their own names.
        return name if ours is None else f"{ours}.{leaf}" if _HYPER not in ours else ours

    def _read_draft_block(self, tensor: GgufTensor, match: re.Match[str]) -> Iterator[Entry]:
        """Yields a tensor of the first block behind the layers; others are not run."""
        drafts, rest = self._own.drafts, match[2]
        is_first = match[1] is None or int(match[1]) == self._num_layers
        if drafts is None or not is_first or rest in _COPIES:
            return
        if rest == _PAIR:
            yield from self._read_pair(tensor, drafts.pair)
        elif rest in drafts.parts:
            yield self._take(tensor, drafts.parts[rest], is_numbers=_HYPER in rest)
        else:
            yield from self._read_block(tensor, drafts.layer, rest)

    def _read_pair(self, tensor: GgufTensor, names: tuple[str, ...]) -> Iterator[Entry]:
        """Yields a matrix over two inputs side by side, or each of them alone."""
        if len(names) == 1:
            yield self._take(tensor, names[0])
            return
        whole = describe_tensor(tensor, tensor.name)
        rows, row_items = whole.shape
        if tensor.shape[-1] // 2 % tensor.type.size:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} has rows of {tensor.shape[-1]:,} values, "
                f"whose halves are no whole blocks of {tensor.type.name}."
            )
        for index, name in enumerate(names):
            half = slice(index * row_items // 2, (index + 1) * row_items // 2)
            yield (
                tensor,
                replace(
                    whole,
                    name=name,
                    shape=(rows, row_items // 2),
                    undo=_Columns(half),
                    sources=(whole,),
                ),
            )

    def _read_block(self, tensor: GgufTensor, prefix: str, rest: str) -> Iterator[Entry]:
        own = self._own
        part, _, leaf = rest.rpartition(".")
        if rest == _VALUE_MAPS:
            # It comes with the other half.
            return
        if rest == _KEY_MAPS:
            yield self._join_maps(tensor, f"{prefix}.self_attn.kv_b_proj.weight")
        elif (vector := own.vectors.get(rest)) is not None:
            yield self._take(tensor, f"{prefix}.{vector}", is_numbers=True)
        elif (cut := own.cuts.get(part)) is not None:
            yield from self._cut(tensor, prefix, cut)
        elif part in _STACKS or (part == _FUSED_STACK and leaf != "bias"):
            yield from self._read_stack(tensor, prefix, part, leaf)
        elif part in own.parts:
            name = f"{prefix}.{own.parts[part]}.{leaf}"
            yield self._take(tensor, name, is_numbers=rest in _NUMBERS)
        else:
            # The loader reports it by this name.
            yield self._take(tensor, tensor.name)

    def _take(self, tensor: GgufTensor, name: str, *, is_numbers: bool = False) -> Entry:
        stored = describe_tensor(tensor, name)
        if stored.dtype == "U8":
            if not is_numbers:
                return tensor, stored
            decode = _Decode(tensor.type.name, name, tensor.shape)
            stored = replace(
                stored, shape=tensor.shape, dtype="F32", undo=decode, sources=(stored,)
            )
            shape = self._conversion.find_shape(name, stored.shape)
            then = self._conversion.find_undo(name, shape[0])
            return tensor, replace(stored, shape=shape, undo=_Then(decode, shape, then))
        shape = self._conversion.find_shape(name, stored.shape)
        undo = self._conversion.find_undo(name, shape[0])
        return tensor, replace(stored, shape=shape, undo=undo)

    def _cut(self, tensor: GgufTensor, prefix: str, cut: Cut) -> Iterator[Entry]:
        """Yields the matrices that one of the file is."""
        whole = describe_tensor(tensor, tensor.name)
        parts = cut.find_rows(find_keys(self._file), whole.shape[0])
        for name, rows in zip(cut.names, parts, strict=True):
            yield (
                tensor,
                replace(
                    whole,
                    name=f"{prefix}.{name}.weight",
                    shape=(len(rows), *whole.shape[1:]),
                    num_bytes=whole.num_bytes // whole.shape[0] * len(rows),
                    undo=_Rows(rows),
                    sources=(whole,),
                ),
            )

    def _join_maps(self, keys: GgufTensor, name: str) -> Entry:
        """Returns the matrix of keys and values, of which files have each apart, by head."""
        other = keys.name.removesuffix(_KEY_MAPS) + _VALUE_MAPS
        values = self._file.tensors.get(other)
        if values is None:
            raise CheckpointError(f"{keys.file}: {keys.name} stands there without {other}.")
        shapes = keys.shape, values.shape
        if (
            len(shapes[0]) != 3
            or len(shapes[1]) != 3
            or shapes[0][0] != shapes[1][0]
            or shapes[0][1] != shapes[1][2]
        ):
            raise CheckpointError(
                f"{keys.file}: {keys.name} and {other} have the sizes {list(shapes[0])} and "
                f"{list(shapes[1])}, not [heads, rank, keys] and [heads, values, rank]."
            )
        sources = tuple(describe_tensor(tensor, tensor.name) for tensor in (keys, values))
        heads, rank, key_dim = shapes[0]
        stored = replace(
            sources[0],
            name=name,
            shape=(heads * (key_dim + shapes[1][1]), rank),
            dtype="F32",
            undo=_Join(keys, values),
            sources=sources,
        )
        return keys, stored

    def _read_stack(self, tensor: GgufTensor, prefix: str, part: str, leaf: str) -> Iterator[Entry]:
        leaves = [self._own.experts[i] for i in _STACKS.get(part, _BOTH)]
        prefix = f"{prefix}.{self._own.experts[0]}"
        if leaf == "scale" and tensor.type.name == "F32":
            offsets = range(tensor.offset, tensor.offset + tensor.num_bytes, 4)
            for e, offset in enumerate(offsets):
                for name in leaves:
                    full = f"{prefix}.{e}.{name}.scale"
                    yield tensor, StoredTensor(full, (1,), "F32", tensor.file, offset, 4)
            return
        if leaf == "bias":
            yield tensor, describe_tensor(tensor, f"{prefix}.{leaves[0]}_bias")
            return
        if len(tensor.shape) != 3 or not tensor.shape[0] or tensor.shape[1] % len(leaves):
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} has the sizes {list(tensor.shape)}, not "
                "those of [experts, rows, columns]."
            )
        keys = find_keys(self._file)
        if keys.has("expert_count") and keys.count("expert_count") != tensor.shape[0]:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is of {tensor.shape[0]} experts, and the "
                f"file's keys say {keys.count('expert_count')}."
            )
        whole = describe_tensor(tensor, tensor.name)
        num_rows = tensor.shape[1] // len(leaves)
        each = tensor.num_bytes // tensor.shape[0] // len(leaves)
        for index in range(tensor.shape[0] * len(leaves)):
            expert, matrix = divmod(index, len(leaves))
            yield (
                tensor,
                replace(
                    whole,
                    name=f"{prefix}.{expert}.{leaves[matrix]}.weight",
                    shape=(num_rows, whole.shape[2]),
                    offset=tensor.offset + index * each,
                    num_bytes=each,
                ),
            )


class _Join:
    """Makes rows of keys, then of values, by head, of both apart; keys lie transposed."""

    def __init__(self, *tensors: GgufTensor) -> None:
        self._tensors = tensors

    def __call__(self, *stored: torch.Tensor) -> torch.Tensor:
        keys, values = (
            own.float()
            if tensor.type.size == 1
            else _Decode(tensor.type.name, tensor.name, tensor.shape)(own)
            for own, tensor in zip(stored, self._tensors, strict=True)
        )
        return torch.cat([keys.mT, values], 1).flatten(0, 1)


class _Rows:
    """Takes some rows of a matrix."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = torch.tensor(rows)

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self._rows]


class _Columns:
    """Takes some columns of a matrix, or some bytes of its rows."""

    def __init__(self, columns: slice) -> None:
        self._columns = columns

    def __call__(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[:, self._columns]


class _Decode:
    """Makes fp32 numbers of blocks."""

    def __init__(self, type_name: str, name: str, shape: tuple[int, ...]) -> None:
        self._type_name, self._name, self._shape = type_name, name, shape

    def __call__(self, blocks: torch.Tensor) -> torch.Tensor:
        return decode_blocks(self._type_name, blocks.flatten(0, -2), self._name).view(self._shape)


class _Then:
    """Makes numbers of blocks, and undoes what conversion changed."""

    def __init__(self, decode: _Decode, shape: tuple[int, ...], undo: object | None) -> None:
        self._decode, self._shape, self._undo = decode, shape, undo

    def __call__(self, blocks: torch.Tensor) -> torch.Tensor:
        values = self._decode(blocks).view(self._shape)
        return self._undo(values) if callable(self._undo) else values


def decode_blocks(type_name: str, blocks: torch.Tensor, name: str) -> torch.Tensor:
    """Return the values, fp32 [R, columns], of rows of blocks, uint8 [R, bytes of a row]."""
    packed = PackedRows(read_blocks(type_name, blocks), name)
    values = torch.empty(packed.num_rows, packed.num_columns)
    packed.write_rows(0, values)
    return values


def describe_tensor(tensor: GgufTensor, name: str) -> StoredTensor:
    """Return a tensor as it lies in its file: blocks are rows of bytes (U8)."""
    shape, block = tensor.shape, tensor.type
    if block.size == 1:
        return StoredTensor(name, shape, block.name, tensor.file, tensor.offset, tensor.num_bytes)
    shape = (*shape[:-1], shape[-1] // block.size * block.num_bytes)
    return StoredTensor(name, shape, "U8", tensor.file, tensor.offset, tensor.num_bytes)
