"""Experts' stored matrices moved into one stack, so that a kernel takes all of them at once."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import GroupValues, PackedRows
from vllm.model_executor.layers.quantization.storages import Fp4Groups, Fp8Blocks
from vllm.v1.attention.ops.stored import MatrixStack, PanelStack, RowSource


def stack_stored(sources: Sequence[RowSource | None], num_matrices: int) -> MatrixStack | None:
    """As ``stack_packed``, of FP8 blocks and FP4 groups too."""
    return stack_packed(sources, num_matrices) or _stack_coded(sources, num_matrices)


def _stack_coded(sources: Sequence[RowSource | None], num_matrices: int) -> MatrixStack | None:
    coded = [source for source in sources if isinstance(source, Fp8Blocks | Fp4Groups)]
    if not coded or len(coded) < len(sources):
        return None
    stacks = [source.find_stack() for source in coded]
    first = stacks[0]
    forms = {
        (own.kind, own.scale_shape, own.codes.shape, own.scales.shape, own.scales.dtype)
        for own in stacks
    }
    joined = len(coded) // num_matrices
    if len(forms) > 1 or (joined > 1 and first.out_size % first.scale_shape[0]):
        return None
    codes = torch.cat([own.codes for own in coded])
    scales = torch.cat([own.scales for own in coded])
    count = len(coded)
    for own, its_codes, its_scales in zip(
        coded, codes.chunk(count), scales.chunk(count), strict=True
    ):
        own.codes, own.scales = its_codes, its_scales
    return replace(
        first,
        codes=codes.view(num_matrices, joined * first.out_size, -1),
        scales=scales.view(num_matrices, -1, scales.shape[1]),
    )


def stack_packed(sources: Sequence[RowSource | None], num_matrices: int) -> PanelStack | None:
    """Moves packed matrices of one shape into common memory, each below the one before.

    Args:
        sources: The matrices, loaded; an equal number of neighbours make one of the stack.
        num_matrices: Matrices of the stack.

    Returns:
        None, with nothing moved: they are not packed, not alike or not as kernels take them.

    Mutates: the sources, whose values lie in the stack from now on.
    """
    rows = [source.packed for source in sources if isinstance(source, PackingStorage)]
    if not rows or len(rows) < len(sources) or any(not _are_alike(rows[0], own) for own in rows):
        return None
    joined = len(rows) // num_matrices
    first = rows[0].find_stack()
    # Inputs are rounded once for all matrices, in one order.
    if first is None or (first.order is not None and first.inputs != "whole"):
        return None
    orders = [own.order for own in rows if own.order is not None]
    codes = torch.cat([own.codes for own in rows])
    scales = _join([own.scales for own in rows])
    offsets = [own.offsets for own in rows if own.offsets is not None]
    shifts = _join(offsets) if offsets else None
    count = len(rows)
    for index, own in enumerate(rows):
        own.codes = codes.chunk(count)[index]
        own.scales = _take(scales, index, count)
        own.offsets = None if shifts is None else _take(shifts, index, count)
    return replace(
        first,
        codes=codes,
        scales=scales.in_panels(),
        offsets=None if shifts is None else shifts.in_panels(),
        order=torch.stack(orders) if orders else None,
        out_size=joined * rows[0].num_rows,
        num_matrices=num_matrices,
        num_parts=joined,
    )


def _are_alike(one: PackedRows, other: PackedRows) -> bool:
    """Whether a kernel can take two matrices by the same launch."""
    return (
        (one.order is None) == (other.order is None)
        and (one.kind, one.group, one.inputs) == (other.kind, other.group, other.inputs)
        and (one.num_rows, one.num_columns) == (other.num_rows, other.num_columns)
        and _form_of(one.scales) == _form_of(other.scales)
        and _form_of(one.offsets) == _form_of(other.offsets)
    )


def _form_of(numbers: GroupValues | None) -> tuple[torch.dtype, bool, int] | None:
    if numbers is None:
        return None
    return numbers.values.dtype, numbers.factors is None, numbers.fan


def _join(parts: Sequence[GroupValues]) -> GroupValues:
    factors = [part.factors for part in parts if part.factors is not None]
    steps = [part.steps for part in parts if part.steps is not None]
    return GroupValues(
        torch.cat([part.values for part in parts]),
        torch.cat(factors) if factors else None,
        parts[0].fan,
        torch.cat(steps) if steps else None,
    )


def _take(numbers: GroupValues, index: int, count: int) -> GroupValues:
    own = numbers.map(lambda values: values.chunk(count)[index])
    return own if own.steps is None else replace(own, steps=own.steps.chunk(count)[index])
