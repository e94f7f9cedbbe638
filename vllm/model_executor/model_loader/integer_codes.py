"""Matrices of integer codes: the tensors that the files have of each, and what reads them.

Every function takes a matrix, makes the destinations of its tensors, and returns what reads them
once they are filled.
"""

from collections.abc import Callable, Mapping

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
from vllm.model_executor.model_loader.bitsandbytes_codes import take_nf4, take_rows_of_bytes
from vllm.model_executor.model_loader.coded_matrix import CodedMatrix
from vllm.model_executor.model_loader.shards import Shard


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
    "nf4": take_nf4,
    "bytes by row": take_rows_of_bytes,
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
