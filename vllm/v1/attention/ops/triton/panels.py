"""Products with matrices packed in panels: codes are decoded in the tile that is multiplied.

    program (block of rows of one matrix, panel of 64 outputs), a loop over words of codes

    words [W, 64] -> codes [W, codes of a word, 64] -> weights [inputs, 64]

A scale belongs to whole words, so it is read once a word and output. Where inputs are rounded to
bytes, codes of both sides are multiplied, exactly, and a group's sum is scaled once: a step of the
loop stays within a group. A row's sums have one order whatever stands beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm.v1.attention.ops.stored import PANEL, CodeKind, PanelNumbers, PanelStack
from vllm.v1.attention.ops.triton.launch import (
    IS_INTERPRETED,
    divide_up,
    launch,
    multiply,
    power_of_two,
    rows_per_program,
)
from vllm.v1.attention.ops.triton.products import join_splits
from vllm.v1.attention.ops.triton.routing import (
    Routing,
    Splits,
    choose_rows_per_block,
    choose_splits,
)
from vllm.v1.attention.ops.triton.small_floats import e2m1_value, e4m3_value, nf4_value, power_of

_PANEL = tl.constexpr(PANEL)
# Inputs of one step of the loop.
_INPUTS = 256 if IS_INTERPRETED else 128
# The least that the matrix unit takes.
_LEAST_INPUTS = 16
_CODES: dict[CodeKind, int] = {"int8": 0, "int4": 1, "uint4": 2, "iq4": 3, "e2m1": 4, "nf4": 5}
# iq4's sixteen values as bytes, the first eight and the last, each as one signed number.
_IQ4_LOW = tl.constexpr(0xF6EADDCFBFAD9881 - (1 << 64))
_IQ4_HIGH = tl.constexpr(0x7159453526190D01)
# What scales are read as.
_NUMBER, _E8M0, _E4M3_IN_STEPS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_BYTE_MAX = tl.constexpr(127.0)
_LEAST_PEAK = tl.constexpr(1e-30)
# Adding and taking away 1.5 * 2^23 rounds to a whole number, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


# -- numbers ----------------------------------------------------------------------------------


@triton.jit
def _code_values(packed, place, KIND: tl.constexpr):
    """Returns the fp32 values of the codes at a place of each word."""
    if KIND == 0:
        byte = (packed >> (place * 8)) & 255
        return tl.where(byte >= 128, byte - 256, byte).to(tl.float32)
    else:
        code = (packed >> (place * 4)) & 15
        if KIND == 1:
            return ((code ^ 8) - 8).to(tl.float32)
        elif KIND == 2:
            return code.to(tl.float32)
        elif KIND == 3:
            table = tl.where(code >= 8, _IQ4_HIGH, _IQ4_LOW)
            byte = ((table >> ((code & 7) * 8).to(tl.int64)) & 255).to(tl.int32)
            return tl.where(byte >= 128, byte - 256, byte).to(tl.float32)
        elif KIND == 5:
            return nf4_value(code)
        else:
            return e2m1_value(code)


@triton.jit
def _read_numbers(
    values,
    factors,
    panel,
    group,
    lane,
    mask,
    num_groups,
    num_factors,
    FAN: tl.constexpr,
    FORM: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):
    """Returns the fp32 numbers [groups, 64] of some groups of a panel."""
    at = (panel * num_groups + group)[:, None] * _PANEL + lane[None, :]
    if FORM == _E8M0:
        return power_of(tl.load(values + at, mask=mask, other=127))
    if FORM == _E4M3_IN_STEPS:
        bits = e4m3_value(tl.load(values + at, mask=mask, other=0)).to(tl.int32, bitcast=True)
        step = tl.load(factors + panel * 8 + ((bits >> 20) & 7))
        # What is left is the power of two, and the sign.
        return step * ((bits >> 23) << 23).to(tl.float32, bitcast=True)
    number = tl.load(values + at, mask=mask, other=0).to(tl.float32)
    if HAS_FACTORS:
        at = (panel * num_factors + group // FAN)[:, None] * _PANEL + lane[None, :]
        number = number * tl.load(factors + at, mask=mask, other=0.0).to(tl.float32)
    return number


@triton.jit
def _load_words(
    codes,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    panel,
    word,
    lane,
    num_words,
    num_groups,
    num_scale_factors,
    num_offset_factors,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    SCALE_FAN: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    HAS_SCALE_FACTORS: tl.constexpr,
    OFFSET_FAN: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_OFFSET_FACTORS: tl.constexpr,
):
    """Returns codes' values [words, codes of one, lanes], their scales and offsets [words, lanes].

    Where there are no offsets, the scales stand in their place.
    """
    is_word = (word < num_words)[:, None] & (lane < _PANEL)[None, :]
    at = (panel * num_words + word)[:, None] * _PANEL + lane[None, :]
    packed = tl.load(codes + at, mask=is_word, other=0)
    place = tl.arange(0, PER_WORD)
    values = _code_values(packed[:, None, :], place[None, :, None], KIND)
    group = word // GROUP_WORDS
    scale = _read_numbers(
        scales,
        scale_factors,
        panel,
        group,
        lane,
        is_word,
        num_groups,
        num_scale_factors,
        SCALE_FAN,
        SCALE_FORM,
        HAS_SCALE_FACTORS,
    )
    offset = scale
    if HAS_OFFSETS:
        offset = _read_numbers(
            offsets,
            offset_factors,
            panel,
            group,
            lane,
            is_word,
            num_groups,
            num_offset_factors,
            OFFSET_FAN,
            _NUMBER,
            HAS_OFFSET_FACTORS,
        )
    return values, scale, offset


@triton.jit
def _weigh_codes(values, scale, offset, HAS_OFFSETS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Returns the weights [words, codes of one, lanes] that codes stand for."""
    if HAS_ZEROS:
        # Whole numbers: the difference is exact.
        return (values - offset[:, None, :]) * scale[:, None, :]
    values = values * scale[:, None, :]
    if HAS_OFFSETS:
        values = values + offset[:, None, :]
    return values


@dataclass(frozen=True, slots=True)
class _Numbers:
    """``PanelNumbers`` as launches take them."""

    values: torch.Tensor
    factors: torch.Tensor
    num_groups: int
    num_factors: int
    fan: int
    form: int
    has_factors: bool

    @classmethod
    def of(cls, numbers: PanelNumbers) -> "_Numbers":
        num_groups = numbers.values.shape[1]
        if numbers.steps is not None:
            # No card needs to know the type; steps stand where factors do.
            codes = numbers.values.view(torch.uint8)
            return cls(codes, numbers.steps, num_groups, 1, 1, _E4M3_IN_STEPS.value, False)
        factors = numbers.values if numbers.factors is None else numbers.factors
        return cls(
            numbers.values,
            factors,
            num_groups,
            factors.shape[1],
            numbers.fan,
            (_E8M0 if numbers.values.dtype == torch.uint8 else _NUMBER).value,
            numbers.factors is not None,
        )


def _take_apart(stack: PanelStack) -> tuple[tuple[torch.Tensor | int, ...], dict[str, int]]:
    """Returns what both kernels take of a stack: their first arguments, and constants."""
    scales = _Numbers.of(stack.scales)
    offsets = scales if stack.offsets is None else _Numbers.of(stack.offsets)
    arguments = (
        stack.codes,
        scales.values,
        scales.factors,
        offsets.values,
        offsets.factors,
        stack.codes.shape[1],
        scales.num_groups,
        scales.num_factors,
        offsets.num_factors,
        stack.in_size,
    )
    per_word = _codes_of_word(stack)
    constants: dict[str, int] = {
        "KIND": _CODES[stack.kind],
        "PER_WORD": per_word,
        "GROUP_WORDS": max(1, stack.group // per_word),
        "SCALE_FAN": scales.fan,
        "SCALE_FORM": scales.form,
        "HAS_SCALE_FACTORS": scales.has_factors,
        "OFFSET_FAN": offsets.fan,
        "HAS_OFFSETS": stack.offsets is not None,
        "HAS_OFFSET_FACTORS": offsets.has_factors,
        "HAS_ZEROS": stack.has_zeros,
    }
    return arguments, constants


def _codes_of_word(stack: PanelStack) -> int:
    return 4 if stack.kind == "int8" else 8


# -- rounded inputs ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _round_kernel(
    x,
    order,
    codes,
    scales,
    num_rows,
    x_stride,
    in_size,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    group = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    column = group * GROUP + place
    is_column = (place < GROUP) & (column < in_size)
    source = column
    if HAS_ORDER:
        source = tl.load(order + column, mask=is_column, other=0)
    mask = is_row[:, None] & is_column[None, :]
    wide = row.to(tl.int64)
    values = tl.load(x + wide[:, None] * x_stride + source[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    sizes = tl.abs(values)
    peak = tl.max(sizes, 1)
    is_number = tl.sum((sizes < float("inf")).to(tl.int32), 1) == BLOCK
    # Divided as a CPU divides: a card's own division is off by a bit, and so would codes be.
    factor = tl.div_rn(tl.zeros((ROWS,), tl.float32) + _BYTE_MAX, peak)
    rounded = (values * factor[:, None] + _ROUNDER) - _ROUNDER
    rounded = tl.where((is_number & (peak >= _LEAST_PEAK))[:, None], rounded, 0.0)
    scale = tl.div_rn(peak, tl.zeros((ROWS,), tl.float32) + _BYTE_MAX)
    scale = tl.where(is_number, scale, float("nan"))
    target = wide[:, None] * in_size + column[None, :]
    tl.store(codes + target, rounded.to(tl.float16), mask=mask)
    tl.store(scales + wide * num_groups + group, scale, mask=is_row)


def _round_inputs(x: torch.Tensor, stack: PanelStack) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs as whole numbers to 127, fp16 [T, in] in the codes' order, and their scales.

    Scales are fp32 [T, groups]: of one group where a row is rounded as a whole.
    """
    is_whole = stack.inputs == "bytes by row"
    group = stack.in_size if is_whole else stack.group * stack.span
    num_groups = divide_up(stack.in_size, group)
    codes = torch.empty((len(x), stack.in_size), dtype=torch.float16, device=x.device)
    scales = torch.empty((len(x), num_groups), dtype=torch.float32, device=x.device)
    rows = rows_per_program(group)
    launch(
        _round_kernel,
        (divide_up(len(x), rows), num_groups),
        x,
        codes if stack.order is None else stack.order,
        codes,
        scales,
        len(x),
        x.stride(0),
        stack.in_size,
        num_groups,
        GROUP=group,
        BLOCK=power_of_two(group),
        ROWS=rows,
        HAS_ORDER=stack.order is not None,
        # Else the product and the rounding after it become one step, which rounds ties otherwise.
        enable_fp_fusion=False,
    )
    if is_whole or stack.span == 1:
        return codes, scales
    by_group = scales.repeat_interleave(stack.span, 1)
    return codes, by_group[:, : divide_up(stack.in_size, stack.group)].contiguous()


# -- products ---------------------------------------------------------------------------------


@triton.jit
def _sum_panel(
    codes,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    num_words,
    num_groups,
    num_scale_factors,
    num_offset_factors,
    in_size,
    x,
    x_scales,
    order,
    row,
    is_row,
    panel,
    first_word,
    end_word,
    x_stride,
    num_x_groups,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    SCALE_FAN: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    HAS_SCALE_FACTORS: tl.constexpr,
    OFFSET_FAN: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_OFFSET_FACTORS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Returns fp32 sums [rows, 64] over some words of a panel."""
    lane = tl.arange(0, _PANEL)
    sums = tl.zeros((ROWS, _PANEL), tl.float32)
    for first in range(first_word, end_word, WORDS):
        word = first + tl.arange(0, WORDS)
        values, scale, offset = _load_words(
            codes,
            scales,
            scale_factors,
            offsets,
            offset_factors,
            panel,
            word,
            lane,
            num_words,
            num_groups,
            num_scale_factors,
            num_offset_factors,
            KIND,
            PER_WORD,
            GROUP_WORDS,
            SCALE_FAN,
            SCALE_FORM,
            HAS_SCALE_FACTORS,
            OFFSET_FAN,
            HAS_OFFSETS,
            HAS_OFFSET_FACTORS,
        )
        column = first * PER_WORD + tl.arange(0, WORDS * PER_WORD)
        is_column = column < in_size
        mask = is_row[:, None] & is_column[None, :]
        source = column
        if HAS_ORDER:
            source = tl.load(order + column, mask=is_column, other=0)
        inputs = tl.load(x + row[:, None] * x_stride + source[None, :], mask=mask, other=0.0)
        if IS_ROUNDED:
            # All words of this step are of one group.
            if HAS_ZEROS:
                values = values - offset[:, None, :]
            weights = tl.reshape(values, (WORDS * PER_WORD, _PANEL)).to(tl.float16)
            x_group = tl.minimum(first // GROUP_WORDS, num_x_groups - 1)
            step = tl.load(x_scales + row * num_x_groups + x_group, mask=is_row, other=0.0)
            is_first = (tl.arange(0, WORDS) == 0)[:, None]
            part = multiply(inputs, weights)
            part = part * tl.sum(tl.where(is_first, scale, 0.0), 0)[None, :]
            if HAS_OFFSETS and not HAS_ZEROS:
                shift = tl.sum(tl.where(is_first, offset, 0.0), 0)[None, :]
                part += tl.sum(inputs.to(tl.float32), 1)[:, None] * shift
            sums += part * step[:, None]
        else:
            values = _weigh_codes(values, scale, offset, HAS_OFFSETS, HAS_ZEROS)
            weights = tl.reshape(values, (WORDS * PER_WORD, _PANEL)).to(inputs.dtype)
            sums += multiply(inputs, weights)
    return sums


@triton.jit(do_not_specialize=["num_pairs"])
def _panel_product_kernel(
    codes,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    num_words,
    num_groups,
    num_scale_factors,
    num_offset_factors,
    in_size,
    x,
    x_scales,
    order,
    bias,
    out,
    pairs,
    experts,
    num_pairs,
    num_matrices,
    num_chosen,
    x_stride,
    out_stride,
    out_size,
    num_panels,
    part_panels,
    part_size,
    num_x_groups,
    split_words,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    SCALE_FAN: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    HAS_SCALE_FACTORS: tl.constexpr,
    OFFSET_FAN: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_OFFSET_FACTORS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ROUTED: tl.constexpr,
    IS_GATHER: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    block = tl.program_id(0)
    matrix = 0
    if IS_ROUTED:
        matrix = tl.load(experts + block)
    if matrix < num_matrices:
        pair = block * ROWS + tl.arange(0, ROWS)
        if IS_ROUTED:
            pair = tl.load(pairs + pair)
        is_row = pair < num_pairs
        row = pair
        if IS_GATHER:
            row = pair // num_chosen
        row = row.to(tl.int64)
        lane = tl.arange(0, _PANEL)
        panel = (matrix * num_panels + tl.program_id(1)).to(tl.int64)
        own_order = order + panel // part_panels * in_size
        split = 0
        if IS_SPLIT:
            split = tl.program_id(2)
        sums = tl.zeros((ROWS, _PANEL), tl.float32)
        for turn in range(0, TURNS):
            first_word = (split + turn) * split_words
            end_word = tl.minimum(first_word + split_words, num_words)
            sums += _sum_panel(
                codes,
                scales,
                scale_factors,
                offsets,
                offset_factors,
                num_words,
                num_groups,
                num_scale_factors,
                num_offset_factors,
                in_size,
                x,
                x_scales,
                own_order,
                row,
                is_row,
                panel,
                first_word,
                end_word,
                x_stride,
                num_x_groups,
                KIND,
                PER_WORD,
                GROUP_WORDS,
                SCALE_FAN,
                SCALE_FORM,
                HAS_SCALE_FACTORS,
                OFFSET_FAN,
                HAS_OFFSETS,
                HAS_OFFSET_FACTORS,
                HAS_ZEROS,
                HAS_ORDER,
                IS_ROUNDED,
                ROWS,
                WORDS,
            )
        output = tl.program_id(1) % part_panels * _PANEL + lane
        is_output = output < part_size
        output += tl.program_id(1) // part_panels * part_size
        if HAS_BIAS:
            added = tl.load(bias + matrix * out_size + output, mask=is_output, other=0.0)
            sums += added.to(tl.float32)[None, :]
        target = pair.to(tl.int64)[:, None] * out_stride + output[None, :]
        if IS_SPLIT:
            target += tl.program_id(2).to(tl.int64) * num_pairs * out_stride
        tl.store(
            out + target,
            sums.to(out.dtype.element_ty),
            mask=is_row[:, None] & is_output[None, :],
        )


def _choose_words(stack: PanelStack, *, is_rounded: bool) -> int:
    """Returns the words of a step: of rounded inputs, within one group."""
    per_word = _codes_of_word(stack)
    least, most = _LEAST_INPUTS // per_word, _INPUTS // per_word
    words = min(most, max(least, power_of_two(stack.codes.shape[1])))
    group_words = stack.group // per_word
    if is_rounded and stack.scales.values.shape[1] > 1:
        words = min(words, group_words & -group_words)
    return words


def panel_product(
    x: torch.Tensor,
    stack: PanelStack,
    out: torch.Tensor,
    *,
    is_invariant: bool,
    routing: Routing | None = None,
    bias: torch.Tensor | None = None,
    is_gather: bool = False,
) -> None:
    """Maps rows by a matrix in panels, or each pair's row by its expert's.

    Args:
        x: [T, in], a row's values side by side; of pairs unless ``is_gather``.
        stack: The matrix, or the experts'.
        out: [T, out] or [num_pairs, out], a row's values side by side.
        is_invariant: Whether a row's bits must not depend on the batch; of no routing.
        routing: The pairs; None: all rows by one matrix.
        bias: [E, out], or None.
        is_gather: Whether x has rows by token.

    Mutates:
        out.
    """
    per_word = _codes_of_word(stack)
    is_rounded = stack.inputs != "whole"
    words = _choose_words(stack, is_rounded=is_rounded)
    x_scales, order, num_x_groups = x, stack.order, 1
    if is_rounded:
        x, x_scales = _round_inputs(x, stack)
        order, num_x_groups = None, x_scales.shape[1]
        if words * per_word < _LEAST_INPUTS:
            # Groups too narrow for the matrix unit: the numbers that codes stand for instead.
            x, is_rounded = _widen_inputs(x, x_scales, stack), False
            words = _choose_words(stack, is_rounded=False)
    arguments, constants = _take_apart(stack)
    part_panels = divide_up(stack.part_size, PANEL)
    num_panels = stack.num_parts * part_panels
    num_steps = divide_up(stack.codes.shape[1], words)
    splits, target = Splits(1, num_steps), out
    if routing is None:
        num_pairs, num_chosen = len(x), 1
        rows = choose_rows_per_block(num_pairs, 1, is_invariant=is_invariant)
        num_blocks = divide_up(num_pairs, rows)
        pairs = experts = stack.codes
        splits = choose_splits(num_pairs, num_panels, num_steps, is_invariant=is_invariant)
        if splits.are_programs:
            assert bias is None, "a routing comes with it"
            target = torch.empty(
                (splits.count, num_pairs, out.shape[1]), dtype=torch.float32, device=x.device
            )
    else:
        num_pairs, num_chosen, rows = routing.num_pairs, routing.num_chosen, routing.rows_per_block
        pairs, experts = routing.pairs, routing.experts
        num_blocks = len(experts)
    launch(
        _panel_product_kernel,
        (num_blocks, num_panels, splits.num_programs),
        *arguments,
        x,
        x_scales,
        stack.codes if order is None else order,
        x if bias is None else bias,
        target,
        pairs,
        experts,
        num_pairs,
        stack.num_matrices,
        num_chosen,
        x.stride(0),
        target.stride(-2),
        stack.out_size,
        num_panels,
        part_panels,
        stack.part_size,
        num_x_groups,
        splits.num_steps * words,
        **constants,
        HAS_ORDER=order is not None,
        HAS_BIAS=bias is not None,
        IS_ROUTED=routing is not None,
        IS_GATHER=is_gather,
        IS_ROUNDED=is_rounded,
        IS_SPLIT=splits.are_programs,
        TURNS=splits.num_turns,
        ROWS=rows,
        WORDS=words,
    )
    if splits.are_programs:
        join_splits(target, out)


def _widen_inputs(codes: torch.Tensor, scales: torch.Tensor, stack: PanelStack) -> torch.Tensor:
    """Returns the fp32 numbers that rounded inputs stand for."""
    group = stack.in_size if scales.shape[1] == 1 else stack.group
    return codes.float() * scales.repeat_interleave(group, 1)[:, : stack.in_size]


# -- rows -------------------------------------------------------------------------------------


@triton.jit
def _panel_rows_kernel(
    codes,
    scales,
    scale_factors,
    offsets,
    offset_factors,
    num_words,
    num_groups,
    num_scale_factors,
    num_offset_factors,
    in_size,
    ids,
    order,
    out,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    SCALE_FAN: tl.constexpr,
    SCALE_FORM: tl.constexpr,
    HAS_SCALE_FACTORS: tl.constexpr,
    OFFSET_FAN: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_OFFSET_FACTORS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    WORDS: tl.constexpr,
):
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + target)
    panel = row // _PANEL
    lane = (row % _PANEL) + tl.zeros((1,), tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    values, scale, offset = _load_words(
        codes,
        scales,
        scale_factors,
        offsets,
        offset_factors,
        panel,
        word,
        lane,
        num_words,
        num_groups,
        num_scale_factors,
        num_offset_factors,
        KIND,
        PER_WORD,
        GROUP_WORDS,
        SCALE_FAN,
        SCALE_FORM,
        HAS_SCALE_FACTORS,
        OFFSET_FAN,
        HAS_OFFSETS,
        HAS_OFFSET_FACTORS,
    )
    values = _weigh_codes(values, scale, offset, HAS_OFFSETS, HAS_ZEROS)
    values = tl.reshape(values, (WORDS, PER_WORD))
    column = word[:, None] * PER_WORD + tl.arange(0, PER_WORD)[None, :]
    mask = (word < num_words)[:, None] & (column < in_size)
    place = column
    if HAS_ORDER:
        place = tl.load(order + column, mask=mask, other=0)
    tl.store(out + target * in_size + place, values, mask=mask)


def read_panel_rows(stack: PanelStack, row_ids: torch.Tensor) -> torch.Tensor:
    """Returns rows of a matrix by number: fp32 [N, in] for int64 [N]."""
    arguments, constants = _take_apart(stack)
    num_words = stack.codes.shape[1]
    words = min(256, power_of_two(num_words))
    shape = (len(row_ids), stack.in_size)
    out = torch.empty(shape, dtype=torch.float32, device=row_ids.device)
    launch(
        _panel_rows_kernel,
        (len(row_ids), divide_up(num_words, words)),
        *arguments,
        row_ids,
        stack.codes if stack.order is None else stack.order,
        out,
        **constants,
        HAS_ORDER=stack.order is not None,
        WORDS=words,
    )
    return out
