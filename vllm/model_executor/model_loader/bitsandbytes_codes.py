"""Matrices that bitsandbytes rounded: NF4, whose scales may be rounded too, and LLM.int8().

weight [out * in / 2, 1]                      two codes a byte, row after row
weight.absmax                                 a scale for each block of codes: fp32, or bytes
weight.nested_absmax, .nested_quant_map       what those bytes stand for, but for an offset
weight.quant_state.bitsandbytes__nf4          sizes and the offset, JSON
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.model_executor.layers.quantization.code_layouts import read_int8_codes, read_nf4_bytes
from vllm.model_executor.layers.quantization.packing_storage import Convert
from vllm.model_executor.layers.quantization.panels import NF4, CodedRows
from vllm.model_executor.model_loader.coded_matrix import CodedMatrix

_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = ".weight.nested_absmax", ".weight.nested_quant_map"
_STATE = ".weight.quant_state.bitsandbytes__nf4"
# 0: row after row.
_ORDER = ".weight_format"
# LLM.int8() keeps the largest value of a row, which is the 127th step.
_STEPS = 127
_BYTES = 256


def take_nf4(matrix: CodedMatrix) -> Convert:
    """Make the destinations of a matrix in NF4.

    Raises:
        CheckpointError: A tensor is missing.
        UnsupportedFeatureError: Several ranks share the matrix, or a block is of two rows.
    """
    _refuse_parts(matrix)
    make, (rows, columns) = matrix.make, matrix.size
    make.take(".weight", torch.uint8, (rows * columns // 2, 1))
    for suffix in (_ABSMAX, _MAP, _STATE):
        make.take_as_stored(suffix)
    is_nested = make.has(_NESTED_ABSMAX)
    if is_nested:
        make.take_as_stored(_NESTED_ABSMAX)
        make.take_as_stored(_NESTED_MAP)

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        state = _read_state(matrix, raw[_STATE])
        group = state["blocksize"]
        if columns % group or group % 8:
            raise UnsupportedFeatureError(
                f"{matrix.name} has {columns} inputs, which are not whole blocks of {group}, as "
                "bitsandbytes counts them: use a release in another format, or its BF16 one."
            )
        if not torch.equal(raw[_MAP].cpu(), torch.tensor(NF4)):
            raise UnsupportedFeatureError(
                f"{matrix.name}{_MAP} holds other values than NF4's: use a release in NF4."
            )
        scales = raw[_ABSMAX]
        if is_nested != (scales.dtype == torch.uint8):
            raise CheckpointError(
                f"{matrix.name}{_ABSMAX} holds {'numbers' if is_nested else 'bytes'}, but its "
                f"{_NESTED_ABSMAX.removeprefix('.weight.')} is {'' if is_nested else 'not '}there: "
                "the file is broken; download it again."
            )
        if is_nested:
            # Of each run of so many bytes one scale, and of all one offset.
            nested = raw[_NESTED_ABSMAX].repeat_interleave(state["nested_blocksize"])
            if raw[_NESTED_MAP].numel() != _BYTES or len(nested) < len(scales):
                raise CheckpointError(
                    f"{matrix.name}{_ABSMAX} holds {len(scales)} bytes, of which "
                    f"{raw[_NESTED_MAP].numel()} have a value and {len(nested)} a scale: the file "
                    "is broken; download it again."
                )
            wide = raw[_NESTED_MAP][scales.int()]
            scales = wide * nested[: len(wide)] + state["nested_offset"]
        if scales.numel() != rows * columns // group:
            raise CheckpointError(
                f"{matrix.name}{_ABSMAX} has {scales.numel()} scales for {rows} x {columns} values "
                f"in blocks of {group}: the file is broken; download it again."
            )
        packed = raw[".weight"].view(rows, columns // 2)
        return read_nf4_bytes(packed, scales.float().view(rows, -1), group)

    return convert


def _read_state(matrix: CodedMatrix, stored: torch.Tensor) -> dict[str, Any]:
    """Return what a matrix's JSON says.

    Raises:
        CheckpointError: It is none, or of another matrix.
    """
    name = f"{matrix.name}{_STATE}"
    try:
        state = json.loads(bytes(stored.cpu().tolist()))
    except ValueError as error:
        raise CheckpointError(f"{name} is no JSON: {error}. Download it again.") from error
    if not isinstance(state, dict) or state.get("shape") != list(matrix.size):
        raise CheckpointError(f"{name} is {state!r}; it must have the shape {list(matrix.size)}.")
    state = {"nested_blocksize": 256, "nested_offset": 0.0, **state}
    for key in ("blocksize", "nested_blocksize"):
        if type(state.get(key)) is not int or state[key] <= 0:
            raise CheckpointError(f"{name}: {key!r} is {state.get(key)!r}, which is no size.")
    if type(state["nested_offset"]) is not float:
        raise CheckpointError(f"{name}: 'nested_offset' is {state['nested_offset']!r}, no number.")
    return state


def take_rows_of_bytes(matrix: CodedMatrix) -> Convert:
    """Make the destinations of a matrix of LLM.int8().

    Raises:
        CheckpointError: A tensor is missing.
        UnsupportedFeatureError: Several ranks share the matrix.
    """
    _refuse_parts(matrix)
    make, (rows, _) = matrix.make, matrix.size
    make.take(".weight", torch.int8, matrix.size)
    make.take(".SCB", torch.float32, (rows,))
    if make.has(_ORDER):
        make.take_as_stored(_ORDER)

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        if _ORDER in raw and raw[_ORDER].any():
            raise UnsupportedFeatureError(
                f"{matrix.name}{_ORDER} is {raw[_ORDER].item()}: its bytes stand in the order of a "
                "card's old kernels. Use a release that stores rows, or its BF16 one."
            )
        return read_int8_codes(raw[".weight"], (raw[".SCB"] / _STEPS).view(rows, 1), 0)

    return convert


def _refuse_parts(matrix: CodedMatrix) -> None:
    if matrix.shard is not None:
        raise UnsupportedFeatureError(
            f"{matrix.name} is stored by bitsandbytes, in one piece that ranks cannot share: use "
            "--tensor-parallel-size 1."
        )
