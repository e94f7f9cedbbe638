"""Matrices of integer codes: the tensors that the files have of each, and what reads them.

Every function takes a matrix, makes the destinations of its tensors, and returns what reads them
once they are filled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm.exceptions import CheckpointError, ConfigError
from vllm.model_executor.layers.quantization.code_layouts import (
    read_awq_words,
    read_compressed_words,
    read_gptq_words,
    read_int8_codes,
)
from vllm.model_executor.layers.quantization.packing_storage import Convert
from vllm.model_executor.layers.quantization.panels import CodedRows
from vllm.model_executor.model_loader.quantization_config import WeightScheme
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import Shard

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_INTEGERS = {"I32": torch.int32, "I64": torch.int64}


class RawTensors:
    """Destinations of one matrix's tensors, in the types that the files have.

    Owns: the destinations, by suffix of the matrix's name.

    Args:
        name: The matrix's published name, without ".weight".
        tensors: What the files hold, by the model's names.
        device: Where it lives.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, StoredTensor], device: torch.device
    ) -> None:
        self._name, self._tensors, self._device = name, tensors, device
        self.raw: dict[str, torch.Tensor] = {}

    def take(self, suffix: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Take a tensor that must be there."""
        self.raw[suffix] = torch.empty(shape, dtype=dtype, device=self._device)

    def take_if_stored(self, suffix: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Take one that may be left out."""
        if self._name + suffix in self._tensors:
            self.take(suffix, dtype, shape)

    def take_one(self, suffix: str) -> None:
        """Take a number, which some writers store as a list of one."""
        stored = self._tensors.get(self._name + suffix)
        has_axis = stored is not None and len(stored.shape) > 0
        self.take(suffix, torch.float32, (1,) if has_axis else ())

    def take_floats(self, suffix: str, shape: tuple[int, ...]) -> None:
        """Take scales in their own type: fp16 has no room for all of bf16's."""
        stored = self._tensors.get(self._name + suffix)
        self.take(suffix, _FLOATS.get(stored.dtype if stored else "", torch.float32), shape)

    def take_scales(self, shape: tuple[int, int]) -> None:
        """Take scales of compressed-tensors, which may be one of the whole matrix."""
        stored = self._tensors.get(f"{self._name}.weight_scale")
        is_one = shape[1] == 1 and stored is not None and stored.shape in ((), (1,))
        self.take_floats(".weight_scale", stored.shape if is_one and stored else shape)

    def take_shape(self, shape: tuple[int, int]) -> None:
        """Take the true size of a matrix, which ends within a word perhaps; known already."""
        stored = self._tensors.get(f"{self._name}.weight_shape")
        if stored is not None:
            self.take(".weight_shape", _INTEGERS.get(stored.dtype, torch.int64), (len(shape),))

    def take_zero_bias(self, num_rows: int) -> None:
        """Take a bias of zeros, which some writers store where the model has none."""
        if f"{self._name}.bias" in self._tensors:
            self.raw[".bias"] = torch.zeros(num_rows, device=self._device)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix that is stored as codes.

    Attributes:
        name: Its published name, without ".weight".
        scheme: How it is stored.
        size: Rows and columns of this rank's part.
        whole: The same of all parts together.
        shard: Which part this is; None: all of it.
        make: Takes the destinations.
    """

    name: str
    scheme: WeightScheme
    size: tuple[int, int]
    whole: tuple[int, int]
    shard: Shard | None
    make: RawTensors

    @property
    def width(self) -> int:
        """Codes in a word of 32 bits."""
        return 32 // self.scheme.bits

    @property
    def num_groups(self) -> int:
        """Groups of inputs under one scale, in a row."""
        group = self.scheme.group
        return -(-self.size[1] // group) if group else 1


def _take_int8(matrix: CodedMatrix) -> Convert:
    make, group, num_groups = matrix.make, matrix.scheme.group, matrix.num_groups
    rows, _ = matrix.size
    make.take(".weight", torch.int8, matrix.size)
    make.take_scales((rows, num_groups))

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        scales = raw[".weight_scale"].expand(rows, num_groups)
        return read_int8_codes(raw[".weight"], scales, group)

    return convert


def _take_compressed(matrix: CodedMatrix) -> Convert:
    make, scheme, num_groups = matrix.make, matrix.scheme, matrix.num_groups
    rows, columns = matrix.size
    make.take(".weight_packed", torch.int32, (rows, -(-columns // matrix.width)))
    make.take_scales((rows, num_groups))
    make.take_shape(matrix.size)
    if not scheme.is_symmetric:
        make.take(".weight_zero_point", torch.int32, (-(-rows // matrix.width), num_groups))

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        _check_size(matrix.name, raw.get(".weight_shape"), matrix.whole)
        zeros = raw.get(".weight_zero_point")
        scales = raw[".weight_scale"].expand(rows, num_groups)
        return read_compressed_words(
            raw[".weight_packed"], scales, zeros, scheme.bits, scheme.group, columns
        )

    return convert


def _take_gptq(matrix: CodedMatrix) -> Convert:
    make, scheme, num_groups, width = matrix.make, matrix.scheme, matrix.num_groups, matrix.width
    rows, columns = matrix.size
    _check_whole_words(matrix)
    make.take(".qweight", torch.int32, (columns // width, rows))
    make.take_floats(".scales", (num_groups, rows))
    make.take_if_stored(".qzeros", torch.int32, (num_groups, rows // width))
    make.take_if_stored(".g_idx", torch.int32, matrix.whole[1:])
    make.take_zero_bias(rows)

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        return read_gptq_words(
            raw[".qweight"],
            raw[".scales"],
            raw.get(".qzeros"),
            _take_order(matrix.name, raw.get(".g_idx"), scheme.group, matrix.shard),
            scheme.bits,
            scheme.group,
            adds_one=scheme.adds_one,
        )

    return convert


def _take_awq(matrix: CodedMatrix) -> Convert:
    make, num_groups, width = matrix.make, matrix.num_groups, matrix.width
    rows, columns = matrix.size
    _check_whole_words(matrix)
    make.take(".qweight", torch.int32, (columns, rows // width))
    make.take_floats(".scales", (num_groups, rows))
    make.take(".qzeros", torch.int32, (num_groups, rows // width))
    make.take_zero_bias(rows)

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        return read_awq_words(raw[".qweight"], raw[".scales"], raw[".qzeros"], matrix.scheme.group)

    return convert


# By ``WeightScheme.format``.
TAKE_INTEGERS: Mapping[str, Callable[[CodedMatrix], Convert]] = {
    "int8": _take_int8,
    "packed": _take_compressed,
    "gptq": _take_gptq,
    "awq": _take_awq,
}


def _take_order(
    name: str, group_of_input: torch.Tensor | None, group: int, shard: Shard | None
) -> torch.Tensor | None:
    """Returns the groups of a rank's inputs, numbered from its first.

    Raises:
        ConfigError: Inputs are cut, and groups are not runs of neighbours (``desc_act``).
    """
    if group_of_input is None or shard is None or shard.axis == 0:
        return group_of_input
    whole = torch.arange(len(group_of_input)) // (group or len(group_of_input))
    if not torch.equal(group_of_input.long().cpu(), whole):
        raise ConfigError(
            f"{name} has its inputs in the order of their groups (desc_act), which lie on all of "
            f"{shard.count} ranks: use --tensor-parallel-size 1."
        )
    return None


def _check_size(name: str, stored: torch.Tensor | None, wanted: tuple[int, int]) -> None:
    if stored is not None and tuple(stored.tolist()) != wanted:
        raise CheckpointError(
            f"{name}.weight_shape is {stored.tolist()}, but the model that config.json describes "
            f"needs {list(wanted)}."
        )


def _check_whole_words(matrix: CodedMatrix) -> None:
    rows, columns = matrix.size
    if columns % matrix.width or rows % matrix.width:
        raise CheckpointError(
            f"{matrix.name} has {rows} outputs and {columns} inputs, which are not whole words of "
            f"{matrix.width} codes: config.json describes another model than the weights."
        )
