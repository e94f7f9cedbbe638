"""From the layouts that checkpoints store codes in to ``CodedRows``.

    compressed-tensors   words along inputs, lowest first, codes + 2^(bits - 1); zero points
                         likewise, along outputs
    GPTQ                 words [inputs, out] along inputs, codes and zero points from 0 up
    NVFP4, MXFP4         bytes along inputs, the first of two e2m1 codes low; scales of e4m3 or e8m0
    AWQ                  words [in, outputs] along outputs, in the order 0 2 4 6 1 3 5 7

Codes become two's complement, so that a symmetric matrix has no zero points left.
"""

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.decode import view_as
from vllm.model_executor.layers.quantization.nibble_words import turn_awq_words
from vllm.model_executor.layers.quantization.panels import (
    SIGN_BITS_INT4,
    SIGN_BITS_INT8,
    CodedRows,
    GroupValues,
    pack_bytes,
    pack_nibbles,
    scale_e4m3,
    unit_of,
    unpack_nibbles,
)
from vllm.v1.attention.ops.stored import CodeKind

# Which output of eight each nibble of an AWQ word is.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_KINDS: dict[int, CodeKind] = {4: "int4", 8: "int8"}
_E4M3_NAN = 0x7F
_NVFP4_GROUP = 16
_SIGN_BITS = {4: SIGN_BITS_INT4, 8: SIGN_BITS_INT8}


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes 0 to 2^bits - 1, uint8 [rows, n * 32 / bits], of words int32 [rows, n]."""
    codes = view_as(words, torch.uint8)
    return codes if bits == 8 else unpack_nibbles(codes)


def read_compressed_words(
    words: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    bits: int,
    group: int,
    num_columns: int,
) -> CodedRows:
    """Read compressed-tensors' pack-quantized layout.

    Args:
        words: int32 [out, ceil(in * bits / 32)].
        scales: [out, groups].
        zero_points: int32 [ceil(out * bits / 32), groups], or None.
        bits: Of a code.
        group: Inputs under one scale; 0: all.
        num_columns: in.
    """
    zeros = None
    if zero_points is not None:
        num_rows = words.shape[0]
        zeros = unpack_words(zero_points.T, bits).T[:num_rows].int() - (1 << bits - 1)
    return _join(words ^ _SIGN_BITS[bits], scales, zeros, bits, group, num_columns, None)


def read_gptq_words(
    words: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    group_of_input: torch.Tensor | None,
    bits: int,
    group: int,
    *,
    adds_one: bool,
) -> CodedRows:
    """Read GPTQ's layout.

    Args:
        words: int32 [in * bits / 32, out].
        scales: [groups, out].
        zero_points: int32 [groups, out * bits / 32]; None: the middle.
        group_of_input: int32 [in], or None: inputs lie in the groups' order.
        bits: Of a code.
        group: Inputs of a group; 0: all.
        adds_one: Whether zero points are stored less one, as the first layout has them.

    Raises:
        CheckpointError: The groups of ``group_of_input`` are not of that size.
    """
    num_columns = words.shape[0] * 32 // bits
    zeros = None
    if zero_points is not None:
        stored = unpack_words(zero_points, bits).int() + int(adds_one)
        # A stored 15 stands for 16, which four bits hold as 0.
        zeros = (stored & ((1 << bits) - 1)).T - (1 << bits - 1)
    rows, order = words.T ^ _SIGN_BITS[bits], None
    if group_of_input is not None:
        order = _find_order(group_of_input, group or num_columns)
    if order is not None:
        codes = unpack_words(rows, bits)[:, order.long()]
        rows = pack_bytes(codes) if bits == 8 else pack_nibbles(codes)
    return _join(rows, scales.T, zeros, bits, group, num_columns, order)


def read_awq_words(
    words: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, group: int
) -> CodedRows:
    """Read AWQ's gemm layout.

    Args:
        words: int32 [in, out / 8].
        scales: [groups, out].
        zero_points: int32 [groups, out / 8].
        group: Inputs of a group; 0: all.
    """
    zeros = _unpack_awq(zero_points).T.int() - 8
    rows = turn_awq_words(words).bitwise_xor_(SIGN_BITS_INT4)
    return _join(rows, scales.T, zeros, 4, group, words.shape[0], None)


def read_int8_codes(codes: torch.Tensor, scales: torch.Tensor, group: int) -> CodedRows:
    """Read signed bytes [out, in] under scales [out, groups]."""
    return _join(pack_bytes(codes), scales, None, 8, group, codes.shape[1], None)


def read_nf4_bytes(packed: torch.Tensor, scales: torch.Tensor, group: int) -> CodedRows:
    """Read bitsandbytes' bytes of two codes, the earlier in the high nibble.

    Args:
        packed: uint8 [out, in / 2].
        scales: fp32 [out, in / group].
        group: Inputs of a group.
    """
    words = view_as((packed << 4) | (packed >> 4), torch.int32)
    return CodedRows("nf4", words, packed.shape[1] * 2, group, GroupValues(scales))


def read_fp8_codes(
    name: str, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
) -> CodedRows:
    """Read e4m3 codes under one scale per block.

    Args:
        name: The matrix's published name, for messages.
        codes: uint8 [out, in].
        scales: fp32 or e8m0, uint8, [row blocks, column blocks].
        block: Rows and columns of a block; columns in whole words unless one block has them all.

    Raises:
        CheckpointError: A code is no number.
    """
    _check_e4m3(name, codes)
    rows, columns = codes.shape
    unit = unit_of("e4m3")
    group = block[1] if scales.shape[1] > 1 else unit.count(columns) * unit.num_codes
    own = GroupValues(scales.repeat_interleave(block[0], 0)[:rows])
    return CodedRows("e4m3", pack_bytes(codes), columns, group, own)


def read_nvfp4_codes(
    name: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    whole: tuple[str, torch.Tensor],
    *,
    divides: bool,
) -> CodedRows:
    """Read e2m1 codes under e4m3 scales, which have a scale of the whole matrix.

    Args:
        name: The matrix's published name, for messages.
        codes: uint8 [out, in / 2].
        scales: float8_e4m3fn [out, groups of 16 inputs].
        whole: What follows the name in that of the matrix's scale, and the scale: fp32, one value.
        divides: Whether it divides the scales; else they are multiplied by it.

    Raises:
        CheckpointError: The scale of the matrix is not finite or not above zero.
    """
    check_whole_scale(name, whole, divides=divides)
    numbers = scale_e4m3(scales, whole[1], divides=divides)
    return CodedRows("e2m1", pack_bytes(codes), codes.shape[1] * 2, _NVFP4_GROUP, numbers)


def check_whole_scale(name: str, whole: tuple[str, torch.Tensor], *, divides: bool) -> None:
    """Check the scale of a whole matrix; the arguments are those of ``read_nvfp4_codes``.

    Raises:
        CheckpointError: It is not finite or not above zero.
    """
    suffix, value = whole[0], float(whole[1])
    if not 0 < value < float("inf"):
        raise CheckpointError(
            f"{name}{suffix} is {value}, and must be finite and above zero, as all scales of "
            f"{name} are {'divided' if divides else 'multiplied'} by it: download the checkpoint "
            "again."
        )


def read_mxfp4_codes(codes: torch.Tensor, scales: torch.Tensor, group: int) -> CodedRows:
    """Read e2m1 codes, uint8 [out, in / 2], under scales [out, groups]: uint8, e8m0, or fp32."""
    return CodedRows("e2m1", pack_bytes(codes), codes.shape[1] * 2, group, GroupValues(scales))


def read_mxfp8_codes(name: str, codes: torch.Tensor, scales: torch.Tensor, group: int) -> CodedRows:
    """Read e4m3 codes, uint8 [out, in], under e8m0 scales, uint8 [out, groups].

    Raises:
        CheckpointError: A code is no number.
    """
    _check_e4m3(name, codes)
    return CodedRows("e4m3", pack_bytes(codes), codes.shape[1], group, GroupValues(scales))


def _check_e4m3(name: str, codes: torch.Tensor) -> None:
    if ((codes & _E4M3_NAN) == _E4M3_NAN).any():
        raise CheckpointError(
            f"{name}.weight holds NaN (an FP8 byte 0x7f or 0xff): download it again."
        )


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    nibbles = unpack_words(words, 4).view(len(words), -1, 8)
    codes = torch.empty_like(nibbles)
    codes[:, :, list(_AWQ_ORDER)] = nibbles
    return codes.flatten(1)


def _find_order(group_of_input: torch.Tensor, group: int) -> torch.Tensor | None:
    """Returns the inputs sorted by group, int32; None: they are."""
    num_inputs = len(group_of_input)
    plain = torch.arange(num_inputs, device=group_of_input.device) // group
    if torch.equal(group_of_input.long(), plain):
        return None
    order = torch.argsort(group_of_input, stable=True)
    if not torch.equal(group_of_input[order].long(), plain):
        raise CheckpointError(
            f"g_idx gives the groups of {num_inputs} inputs other sizes than {group}: download the "
            "checkpoint again."
        )
    return order.int()


def _join(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group: int,
    num_columns: int,
    order: torch.Tensor | None,
) -> CodedRows:
    kind = _KINDS[bits]
    if zeros is not None and not zeros.any():
        zeros = None
    if zeros is not None and bits == 4 and scales.dtype == torch.float32:
        # -zero * scale would be rounded: the difference of code and zero point is exact as a byte.
        codes = unpack_nibbles(view_as(words, torch.uint8))[:, :num_columns].to(torch.int8)
        codes = ((codes ^ 8) - 8) - _spread_zeros(zeros, group or num_columns, num_columns)
        kind, words, zeros = "int8", pack_bytes(codes), None
    offsets = None if zeros is None else GroupValues(zeros.to(torch.int8))
    unit = unit_of(kind)
    whole = unit.count(num_columns) * unit.num_codes
    return CodedRows(kind, words, num_columns, group or whole, GroupValues(scales), offsets, order)


def _spread_zeros(zeros: torch.Tensor, group: int, width: int) -> torch.Tensor:
    return zeros.to(torch.int8).repeat_interleave(group, 1)[:, :width]
