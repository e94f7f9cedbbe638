"""Tensors as the structs that the native kernels take.

Nothing is copied but small vectors, and bf16 matrices that are packed.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm.exceptions import InvariantError
from vllm.model_executor.layers.hyper_connections import HyperConnection, HyperHead
from vllm.model_executor.layers.linear import ReplicatedLinear, StoredLinear
from vllm.model_executor.layers.quantization.bf16_panels import Bf16Panels, PackedWeights
from vllm.model_executor.layers.quantization.low_bit_words import make_codebook
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import GroupValues, PackedRows
from vllm.model_executor.layers.quantization.storages import (
    Fp4Groups,
    Fp8Blocks,
    PlainRows,
    StackedRows,
)
from vllm.model_executor.layers.vocab import VocabParallelEmbedding
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.native.step_tables import NativeTables
from vllm.native.structs import (
    BF16,
    BF16_PANELS,
    F16,
    F32,
    FP8,
    INT8,
    MXFP4,
    PANELS,
    PARTS,
    Cache,
    Hyper,
    Matrix,
    Panels,
    Step,
)
from vllm.v1.attention.metadata import CacheLayout
from vllm.v1.attention.ops.stored import RowSource
from vllm.v1.attention.step_pictures import StepPictures

MAX_STREAMS = 8
"""Residual streams that the kernels mix at most."""

_KINDS = {torch.float32: F32, torch.bfloat16: BF16}
_CACHE_KINDS = {**_KINDS, torch.float16: F16, torch.int8: INT8}
_CODE_KINDS = {
    "int8": 0,
    "int4": 1,
    "uint4": 2,
    "iq4": 3,
    "e2m1": 4,
    "int6": 5,
    "e4m3": 6,
    "nf4": 7,
    "odd4": 8,
    "uint2": 9,
    "int2": 10,
    "int3": 11,
    "iq1": 12,
    "iq2": 13,
    "iq2_xxs": 14,
    "iq3_xxs": 15,
}
_INPUT_KINDS = {"whole": 0, "bytes by row": 1, "bytes by group": 2, "two bytes by group": 3}
_SCALE_KINDS = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.uint8: 4,
    torch.float8_e4m3fn: 5,
}
_SCALE_PARTS = {"low": 6, "high": 7, "codes": 8}


def address_of(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Returns where a tensor lies, given that it is what the kernels take it for.

    Raises:
        InvariantError: It has another type, shape, order or place.
    """
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or not tensor.is_contiguous()
        or tensor.device.type != "cpu"
    ):
        raise InvariantError(
            f"the native kernels take a contiguous {dtype} tensor of shape {shape} on the CPU, not "
            f"a {tensor.dtype} of {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device}"
        )
    return tensor.data_ptr()


def make_step(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    tables: NativeTables,
    kept: torch.Tensor | None = None,
) -> Step:
    """Returns the struct over a step's token ids and positions, int64 [T] both, and its tables.

    All must outlive it.

    Args:
        token_ids: Of the tokens.
        positions: Of the tokens.
        tables: Of the requests.
        kept: fp32 [layers, drafts, values]: takes what drafts would do to recurrent states.

    Raises:
        InvariantError: One of the tensors is no such.
    """
    count = len(token_ids)
    return tables.to_struct(
        address_of(token_ids, torch.int64, count),
        address_of(positions, torch.int64, count),
        count,
        0 if kept is None else address_of(kept, torch.float32, *kept.shape),
    )


def put_pictures(step: Step, pictures: StepPictures, width: int) -> None:
    """Puts what pictures change into a step's struct, which they must outlive.

    Raises:
        InvariantError: One of the tensors is not what the kernels take.

    Mutates:
        step.
    """
    count = len(pictures.rows)
    step.num_soft = count
    step.soft_rows = address_of(pictures.rows, torch.int64, count)
    step.soft_values = address_of(pictures.values, torch.float32, count, width)
    if pictures.axes is not None:
        step.axes = address_of(pictures.axes, torch.int64, 3, step.num_tokens)


def can_read(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read weights of this type and place."""
    return tensor.dtype in _KINDS and _is_near(tensor)


def _is_near(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.stride(-1) == 1


def can_read_rows(source: RowSource | None) -> bool:
    """Whether the kernels can read a matrix that is stored so."""
    if isinstance(source, StackedRows):
        return all(can_read_rows(part) for part in source.parts)
    if isinstance(source, PlainRows):
        return can_read(source.weight)
    return isinstance(source, Fp8Blocks | Fp4Groups | PackedRows | PackingStorage)


def can_read_tensors(
    model: nn.Module, kv_caches: Mapping[str, torch.Tensor], *, has_coded_rows: bool = False
) -> bool:
    """Whether the kernels can read a model's parameters, stored matrices and caches.

    Args:
        model: The model.
        kv_caches: Cache name -> view.
        has_coded_rows: Whether caches of int8 are rows of keys and values, which they know.
    """
    # Whole numbers among the parameters are tables and codes.
    floats = [tensor for tensor in model.parameters() if tensor.is_floating_point()]
    linears = [m for m in model.modules() if isinstance(m, ReplicatedLinear | StoredLinear)]
    caches = kv_caches.values()
    return (
        all(can_read(tensor) for tensor in floats)
        and all(cache.dtype in _CACHE_KINDS and _is_near(cache) for cache in caches)
        and (has_coded_rows or all(cache.dtype != torch.int8 for cache in caches))
        and all(cache.stride(1) == cache.shape[2] for cache in caches)
        and all(can_read_rows(layer.find_rows()) for layer in linears)
    )


def find_packed(model: CausalLM[Any], *, releases: bool) -> PackedWeights | None:
    """Returns where a bf16 model's matrices are packed, once for all who run it.

    None: the model is of another type.
    """
    if model.dtype != torch.bfloat16:
        return None
    if model.packed is None:
        model.packed = PackedWeights(releases=releases)
    return model.packed


@dataclass(slots=True)
class TensorBinder:
    """Makes structs over tensors.

    Args:
        layout: The KV groups.
        kv_caches: Cache name -> [num_blocks, rows_per_block, width].
        packed: Where bf16 matrices are packed, and their products' inputs rounded; None: they are
            multiplied as they lie, by fp32 inputs.

    Owns: the fp32 copies of small vectors, and lists of matrices; keep it as long as the structs.
    """

    layout: CacheLayout
    kv_caches: Mapping[str, torch.Tensor]
    packed: PackedWeights | None = None
    copies: list[torch.Tensor] = field(default_factory=list)
    lists: list[ctypes.Array[Matrix]] = field(default_factory=list)
    panels: list[Panels] = field(default_factory=list)

    def matrix(self, weight: torch.Tensor) -> Matrix:
        """Returns [rows, in], or stacked [n, rows, in] as one matrix of n * rows."""
        if self.packed is None or weight.dtype != torch.bfloat16:
            return self.table(weight)
        return _bind_panels(self.packed.pack(weight.detach().view(-1, weight.shape[-1])))

    def copied_matrix(self, weight: torch.Tensor) -> Matrix:
        """Returns stacked [n, rows, in], which may lie in any order, as one matrix [n * rows, in].

        It is copied.
        """
        copy = weight.detach().clone(memory_format=torch.contiguous_format)
        self.copies.append(copy)
        return self.matrix(copy)

    def embedding(self, module: VocabParallelEmbedding) -> Matrix:
        """Returns an embedding's table, after all that is multiplied by was bound."""
        if module.quantised is not None:
            return self.source(module.find_rows())
        if self.packed is not None and self.packed.releases:
            panels = self.packed.find(module.weight)
            if panels is not None:
                module.read_from(panels)
        return self.table(module.weight)

    def table(self, weight: torch.Tensor) -> Matrix:
        """Returns a matrix of which rows are read: as it lies, unless it is multiplied by too."""
        if self.packed is not None and (panels := self.packed.find(weight)):
            return _bind_panels(panels)
        flat = weight.detach().flatten(0, -2)
        assert flat.data_ptr() == weight.data_ptr(), "stacked matrices lie end to end"
        return Matrix(flat.data_ptr(), None, *flat.shape, flat.stride(0), _KINDS[flat.dtype])

    def linear(self, layer: ReplicatedLinear | StoredLinear) -> Matrix:
        """Returns a layer's matrix, as it is stored."""
        return self.source(layer.find_rows())

    def source(self, source: RowSource | None) -> Matrix:
        """Returns a stored matrix that ``can_read_rows`` takes."""
        assert source is not None, "can_read_rows refused it"
        return self.rows(source)

    def stack(self, sources: Sequence[RowSource | None]) -> Matrix:
        """Returns matrices over one input, one below the other."""
        return self._stack([self.source(part) for part in sources])

    def rows(self, source: RowSource) -> Matrix:
        """Returns a stored matrix."""
        if isinstance(source, PlainRows):
            return self.matrix(source.weight)
        if isinstance(source, StackedRows):
            return self._stack([self.rows(part) for part in source.parts if part.num_rows])
        if isinstance(source, PackingStorage):
            source = source.packed
        if isinstance(source, PackedRows):
            return self._panels(source)
        assert isinstance(source, Fp8Blocks | Fp4Groups)
        return _bind_codes(source)

    def _panels(self, source: PackedRows) -> Matrix:
        offsets = source.offsets
        fans = [part.fan for part in (source.scales, offsets) if part is not None]
        packed = Panels(
            codes=source.codes.data_ptr(),
            scales=source.scales.values.data_ptr(),
            scale_factors=_address_or_none(source.scales.factors),
            offsets=_address_or_none(None if offsets is None else offsets.values),
            offset_factors=_address_or_none(None if offsets is None else offsets.factors),
            order=_address_or_none(source.order),
            scale_steps=_address_or_none(source.scales.steps),
            code_kind=_CODE_KINDS[source.kind],
            scale_kind=_scale_kind(source.scales),
            offset_kind=_scale_kind(offsets or source.scales),
            group=source.group,
            factor_groups=max(fans),
            input_kind=_INPUT_KINDS[source.inputs],
            scale_step=source.scales.step,
            # Made once, and kept by what makes it.
            codebook=_address_or_none(make_codebook(source.kind)),
        )
        self.panels.append(packed)
        return Matrix(
            data=ctypes.addressof(packed),
            rows=source.num_rows,
            cols=source.num_columns,
            row_stride=source.num_columns,
            kind=PANELS,
        )

    def _stack(self, parts: list[Matrix]) -> Matrix:
        if len(parts) == 1:
            return parts[0]
        if any(part.kind == PARTS for part in parts):
            # The kernels look one level deep.
            parts = [leaf for part in parts for leaf in self._leaves(part)]
        stacked = (Matrix * len(parts))(*parts)
        self.lists.append(stacked)
        return Matrix(
            data=ctypes.addressof(stacked),
            rows=sum(part.rows for part in parts),
            cols=parts[0].cols,
            row_stride=parts[0].cols,
            kind=PARTS,
            group=len(parts),
        )

    @staticmethod
    def _leaves(matrix: Matrix) -> list[Matrix]:
        if matrix.kind != PARTS:
            return [matrix]
        return list((Matrix * matrix.group).from_address(matrix.data))

    def mxfp4_matrix(self, codes: torch.Tensor, scales: torch.Tensor) -> Matrix:
        """Returns stacked e2m1 codes [n, rows, groups, G / 2] under scales [n, rows, groups]."""
        num_stacked, rows, num_groups, half = codes.shape
        columns = num_groups * 2 * half
        return Matrix(
            codes.data_ptr(),
            scales.data_ptr(),
            num_stacked * rows,
            columns,
            columns,
            MXFP4,
            2 * half,
            rows_per_scale=1,
            has_byte_scales=1,
        )

    def vector(self, values: torch.Tensor) -> int:
        """Returns the address of the values as contiguous fp32."""
        wide = values.detach().float().contiguous()
        self.copies.append(wide)
        return wide.data_ptr()

    def hyper(self, module: HyperConnection | HyperHead) -> Hyper:
        """Returns what mixes residual streams around one sublayer, or behind the last."""
        return Hyper(self.vector(module.fn), self.vector(module.base), self.vector(module.scale))

    def cache(self, name: str, group: int | None = None, head_dim: int = 0) -> Cache:
        """Returns a cache by name.

        Args:
            name: Of the cache.
            group: Whose tables address it; None: its own.
            head_dim: Of rows of int8: values under one scale.
        """
        view = self.kv_caches[name]
        own_group = self.layout.group_of[name]
        return Cache(
            data=view.data_ptr(),
            num_blocks=view.shape[0],
            block_stride=view.stride(0),
            rows_per_block=view.shape[1],
            width=view.shape[2],
            block_size=self.layout.groups[own_group].block_size,
            group=own_group if group is None else group,
            kind=_CACHE_KINDS[view.dtype],
            head_dim=head_dim,
        )


def _bind_panels(panels: Bf16Panels) -> Matrix:
    return Matrix(
        data=panels.words.data_ptr(),
        rows=panels.num_rows,
        cols=panels.num_columns,
        row_stride=panels.num_columns,
        kind=BF16_PANELS,
    )


def _scale_kind(numbers: GroupValues) -> int:
    if numbers.part == "whole":
        return _SCALE_KINDS[numbers.values.dtype]
    return _SCALE_PARTS[numbers.part]


def _address_or_none(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _bind_codes(source: Fp8Blocks | Fp4Groups) -> Matrix:
    rows, columns = source.num_rows, source.num_columns
    if isinstance(source, Fp8Blocks):
        kind, (rows_per_scale, group) = FP8, source.block_shape
    else:
        kind, rows_per_scale, group = MXFP4, 1, source.group_size
    return Matrix(
        data=source.codes.data_ptr(),
        scales=source.scales.data_ptr(),
        rows=rows,
        cols=columns,
        row_stride=columns,
        kind=kind,
        group=group,
        rows_per_scale=rows_per_scale,
        has_byte_scales=source.scales.dtype == torch.uint8,
    )
