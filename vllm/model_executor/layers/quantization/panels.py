"""Matrices of small whole numbers, packed as the native kernels read them.

    weight = code * scale + offset

Outputs lie in lanes, 64 to a panel; the codes of eight inputs (four, of bytes) of one output are a
word of 32 bits, the first input lowest; sixteen of six bits are three words (``pack_six_bits``).
Scales and offsets are those of a group of inputs:

    codes   int32 [panels, words, 64]
    scales        [panels, groups, 64]

What the codes of a format mean is one of ``CODE_KINDS``; scales stay in the type that their
checkpoint has, so that nothing but the padding is added to its bytes.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from vllm.exceptions import CheckpointError, InvariantError
from vllm.model_executor.layers.quantization.decode import decode_e8m0, view_as
from vllm.model_executor.layers.quantization.low_bit_words import LOW_BIT_KINDS, widen_low_bits
from vllm.utils.huge_pages import HUGE_PAGE_BYTES, map_huge_pages
from vllm.v1.attention.ops.stored import (
    PANEL,
    CodeKind,
    Inputs,
    PanelNumbers,
    PanelStack,
    RowSource,
)

NumberPart = Literal["whole", "low", "high", "codes"]
_Change = Callable[[torch.Tensor], torch.Tensor]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# bitsandbytes' "normal float": quantiles of a normal distribution, of which the largest is 1.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_TABLES: dict[CodeKind, tuple[float, ...]] = {
    "int4": (*range(8), *range(-8, 0)),
    "uint4": tuple(range(16)),
    "iq4": _IQ4,
    "e2m1": _E2M1,
    "nf4": NF4,
    "odd4": tuple(range(-15, 16, 2)),
}
SIGN_BITS_INT4 = -0x77777778
"""0x88888888: turns words of 0 to 15 into words of -8 to 7."""
SIGN_BITS_INT8 = -0x7F7F7F80
"""0x80808080: turns words of 0 to 255 into words of -128 to 127."""
SIX_BIT_LIFT = 32
"""What is added to codes of six bits where they are kept."""
_E8M0_NAN = 255
_E4M3_NAN = 0x7F
_SIGN_AND_EXPONENT = -0x800000
# e4m3's numbers lie between 2^-9 and 2^9: within these bounds their products are normal numbers.
_LEAST_STEP, _LARGEST_STEP = 2.0**-117, 2.0**118
# Sums of so many products of bytes are whole numbers of 32 bits; of so many, times scales, too.
_MOST_BYTE_INPUTS = 1 << 17
_MOST_SPAN_INPUTS = 1024
_LEAST_PEAK = 1e-30
_SHARED_BYTES = 32 << 20
_LINE_BYTES = 64
_BYTE_MAX = 127


@dataclass(frozen=True, slots=True)
class CodeUnit:
    """So many codes of one output, in so many words of 32 bits.

    Attributes:
        num_codes: Of a unit.
        num_words: Of one, or of two side by side where they share a word.
        num_beside: Units in so many words: 1, or 2.
    """

    num_codes: int
    num_words: int = 1
    num_beside: int = 1

    def count(self, num_columns: int) -> int:
        """Return how many units hold so many codes."""
        return -(-num_columns // self.num_codes)

    def count_words(self, num_columns: int) -> int:
        """Return how many words hold so many codes."""
        return -(-self.count(num_columns) // self.num_beside) * self.num_words


# On accelerators such matrices are kept in other forms.
_CPU_KINDS: frozenset[CodeKind] = LOW_BIT_KINDS | {"int6", "e4m3", "odd4"}
# Their products with bytes are sums over spans alone.
_SPAN_KINDS: frozenset[CodeKind] = (LOW_BIT_KINDS - {"int2"}) | {"odd4"}
_WIDER_KINDS: dict[CodeKind, CodeKind] = {"uint2": "uint4", "int2": "int4", "int3": "int4"}
_UNITS: dict[CodeKind, CodeUnit] = {
    "int8": CodeUnit(4),
    "e4m3": CodeUnit(4),
    "int6": CodeUnit(16, 3),
    "uint2": CodeUnit(16),
    "int2": CodeUnit(16),
    "int3": CodeUnit(16, 3, 2),
    "iq1": CodeUnit(16, 3, 2),
    "iq2": CodeUnit(16, 3, 2),
    "iq2_xxs": CodeUnit(32, 2),
    "iq3_xxs": CodeUnit(32, 3),
}


def unit_of(kind: CodeKind) -> CodeUnit:
    """Return the unit by which codes of a kind are packed."""
    return _UNITS.get(kind, CodeUnit(8))


@dataclass(frozen=True, slots=True)
class GroupValues:
    """One number per output and group of its inputs.

    Attributes:
        values: [rows, groups] of fp32, fp16, bf16, int8, uint8 (e8m0: 2^(byte - 127)), or e4m3
            codes with ``steps``.
        factors: fp16 [rows, ceil(groups / fan)], by which the values are multiplied; None: they
            are the numbers.
        fan: Groups of one factor.
        steps: Of e4m3 codes: what 1, 1.125 .. 1.875 stand for, fp32 [1, 8], in panels [panels, 8];
            others are powers of two of them, see ``scale_e4m3``.
        part: Which part of the values counts: "low" and "high" nibbles of uint8 ones; "codes": the
            top nibble s of int32 ones, which are the last words of a group's codes: 2s + 1.
        step: A power of two, by which all are multiplied.
    """

    values: torch.Tensor
    factors: torch.Tensor | None = None
    fan: int = 1
    steps: torch.Tensor | None = None
    part: NumberPart = "whole"
    step: float = 1.0

    def widen(self) -> torch.Tensor:
        """Return the numbers, fp32 [rows, groups], each the one product of all."""
        if self.part == "whole" and self.values.dtype == torch.uint8:
            return decode_e8m0(self.values)
        wide = self._own_numbers().float() * self.step
        if self.steps is not None:
            bits = wide.view(torch.int32)
            powers = (bits & _SIGN_AND_EXPONENT).view(torch.float32)
            return self.steps[0][(bits >> 20) & 7] * powers
        if self.factors is None:
            return wide
        return wide * _spread(self.factors.float(), self.fan, wide.shape[1])

    def _own_numbers(self) -> torch.Tensor:
        if self.part == "low":
            return self.values & 15
        if self.part == "high":
            return self.values >> 4
        return 2 * ((self.values >> 28) & 15) + 1 if self.part == "codes" else self.values

    def without_parts(self) -> GroupValues:
        """Return the same numbers, of which all bits of the values count."""
        if self.part in ("low", "high"):
            return replace(self, values=self._own_numbers().to(torch.int8), part="whole")
        is_plain = self.part == "whole" and self.step == 1
        return self if is_plain else GroupValues(self.widen())

    @property
    def are_whole(self) -> bool:
        """Whether they are whole numbers of a byte under factors."""
        is_byte = self.part != "whole" or self.values.dtype == torch.int8
        return self.factors is not None and is_byte

    @property
    def are_zeros(self) -> bool:
        """Whether, as offsets, they are zero points: the offset is -zero * scale."""
        return self.values.dtype == torch.int8 and self.factors is None

    def in_panels(self) -> PanelNumbers:
        """Return packed values as kernels take them."""
        return PanelNumbers(self.values, self.factors, self.fan, self.steps)

    def map(self, change: _Change) -> GroupValues:
        """Return the same with values and factors changed."""
        return self.with_values(_change_bytes(self.values, change), change)

    def with_values(self, values: torch.Tensor, change: _Change) -> GroupValues:
        """Return the same with other values, and changed factors."""
        factors = None if self.factors is None else change(self.factors)
        return replace(self, values=values, factors=factors)

    def pack(self) -> GroupValues:
        """Return the same in panels."""
        packed = self.map(pack_panels)
        if self.steps is None:
            return packed
        steps = self.steps.expand(len(packed.values), -1).contiguous()
        return replace(packed, steps=steps)


def scale_e4m3(codes: torch.Tensor, scale: torch.Tensor, *, divides: bool) -> GroupValues:
    """Return e4m3 codes times, or divided by, the scale of a whole matrix, each rounded once.

    The result of one of the eight mantissas, times a power of two, is that of every code which has
    it; where such a number would be too small or too large for that, the numbers are kept in fp32.

    Args:
        codes: float8_e4m3fn [rows, groups].
        scale: fp32, one value: finite and above zero.
        divides: Whether it divides.
    """
    whole = scale.reshape(1, 1)
    mantissas = 1 + torch.arange(8, dtype=torch.float32, device=codes.device)[None] / 8
    steps = mantissas / whole if divides else mantissas * whole
    if steps.min() >= _LEAST_STEP and steps.max() <= _LARGEST_STEP:
        return GroupValues(codes, steps=steps)
    wide = codes.float()
    return GroupValues(wide / whole if divides else wide * whole)


def _change_bytes(values: torch.Tensor, change: _Change) -> torch.Tensor:
    """Returns what a change of places makes of values: of floats of eight bits as of bytes."""
    if values.dtype != torch.float8_e4m3fn:
        return change(values)
    return change(values.view(torch.uint8)).view(values.dtype)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A matrix of codes, row after row: what a format is turned into before it is packed.

    Attributes:
        kind: What the codes are.
        words: int32 [rows, words], or what else ``pack`` takes.
        num_columns: Inputs.
        group: Inputs of a group; the last may be cut off.
        scales: One per group.
        offsets: One per group, or None. int8 without factors: zero points, and the offset is
            -zero * scale.
        order: int32 [num_columns], the input that the k-th code is of; None: the k-th.
        pack: Makes panels int32 [panels, words, 64] of ``words``.
    """

    kind: CodeKind
    words: torch.Tensor
    num_columns: int
    group: int
    scales: GroupValues
    offsets: GroupValues | None = None
    order: torch.Tensor | None = None
    pack: _Change | None = None

    def take_rows(self, rows: torch.Tensor) -> CodedRows:
        """Return the matrix of some rows, in their order."""

        def take(values: torch.Tensor) -> torch.Tensor:
            return values[rows]

        scales = self.scales.map(take)
        offsets = None if self.offsets is None else self._map_offsets(scales, take)
        return replace(self, words=self.words[rows], scales=scales, offsets=offsets)

    def for_accelerators(self) -> CodedRows:
        """Return the same matrix in codes that accelerators' kernels take, with equal values."""
        if self.kind not in _CPU_KINDS:
            return self
        kind = _WIDER_KINDS.get(self.kind, "int8")
        codes = widen_words(self.words, self.kind).to(torch.int8).view(torch.uint8)
        words = pack_bytes(codes) if kind == "int8" else pack_nibbles(codes & 15)
        offsets = None if self.offsets is None else self.offsets.without_parts()
        return replace(
            self, kind=kind, words=words, scales=self.scales.without_parts(), offsets=offsets
        )

    def pack_numbers(self, codes: torch.Tensor) -> tuple[GroupValues, GroupValues | None]:
        """Return scales and offsets in panels; the packed codes may hold the former."""
        if self.scales.part == "codes":
            units = codes.view(len(codes), -1, unit_of(self.kind).num_words, PANEL)
            return self.scales.with_values(units[:, :, -1], pack_panels), None
        scales = self.scales.pack()
        if self.offsets is None:
            return scales, None
        return scales, self._map_offsets(scales, pack_panels)

    def _map_offsets(self, scales: GroupValues, change: _Change) -> GroupValues:
        """Returns the offsets, changed as these scales were: both may be parts of one tensor."""
        assert self.offsets is not None
        if self.offsets.values is self.scales.values:
            return self.offsets.with_values(scales.values, change)
        return self.offsets.map(change)


@dataclass(frozen=True, slots=True)
class PanelParts:
    """All that a ``PackedRows`` keeps: attributes as there."""

    kind: CodeKind
    num_rows: int
    num_columns: int
    group: int
    codes: torch.Tensor
    scales: GroupValues
    offsets: GroupValues | None
    order: torch.Tensor | None


class PackedRows:
    """A ``RowSource`` of packed codes.

    Args:
        rows: The matrix.
        name: Its published name, for messages.
        inputs: What its products' inputs are rounded to.

    Raises:
        CheckpointError: A scale or an offset is no number.
    """

    inputs: Inputs

    def __init__(self, rows: CodedRows, name: str, inputs: Inputs = "whole") -> None:
        unit = unit_of(rows.kind)
        self.kind = rows.kind
        self.num_rows, self.num_columns = rows.words.shape[0], rows.num_columns
        num_units = unit.count(rows.num_columns)
        # One group of all inputs ends where the padding does.
        self.group = min(rows.group, num_units * unit.num_codes)
        self.codes = (rows.pack or pack_panels)(rows.words)
        num_words = self.codes.shape[1]
        if num_words != unit.count_words(rows.num_columns) or self.group % unit.num_codes:
            raise InvariantError(
                f"{name}: {num_words} words of {rows.kind} codes and groups of "
                f"{rows.group} for {rows.num_columns} inputs"
            )
        for part, what in ((rows.scales, "scale"), (rows.offsets, "offset")):
            if part is not None:
                _check_numbers(name, what, part)
        self.scales, self.offsets = rows.pack_numbers(self.codes)
        self.order = rows.order
        self.inputs = self._find_inputs(inputs)

    @classmethod
    def of_parts(cls, parts: PanelParts, inputs: Inputs) -> PackedRows:
        """Return the matrix of what another kept."""
        packed = cls.__new__(cls)
        for part in fields(parts):
            setattr(packed, part.name, getattr(parts, part.name))
        packed.inputs = packed._find_inputs(inputs)
        return packed

    @property
    def parts(self) -> PanelParts:
        """All that it keeps, but what inputs are rounded to."""
        return PanelParts(*(getattr(self, part.name) for part in fields(PanelParts)))

    def _find_inputs(self, wanted: Inputs) -> Inputs:
        takes_bytes = self.kind != "e4m3" and self.group <= _MOST_BYTE_INPUTS
        if self.kind in _SPAN_KINDS:
            takes_bytes = self.find_span() > 0
        return wanted if takes_bytes else "whole"

    def find_span(self) -> int:
        """Return the groups whose inputs are rounded as one: sums of whole numbers go over all.

        They are those of a factor of scales that are whole numbers, or an even part of them. 0:
        scales are none, or codes have four bits and more: their errors are so small that those of
        inputs rounded by 256 count. The native kernels' ``find_span`` is the same rule.
        """
        if self.kind not in _SPAN_KINDS:
            return 0
        parts = [part for part in (self.scales, self.offsets) if part is not None]
        if not all(part.are_whole for part in parts):
            return 0
        fan = max(part.fan for part in parts)
        most = min(fan, _MOST_SPAN_INPUTS // self.group)
        return next((span for span in range(most, 0, -1) if fan % span == 0), 0)

    @property
    def nbytes(self) -> int:
        """The bytes it keeps."""
        tensors = [self.codes, self.order]
        for part in (self.scales, self.offsets):
            if part is not None:
                tensors += [part.factors, part.steps]
                tensors += [] if part.part in ("codes", "high") else [part.values]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def round_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``."""
        if self.inputs == "whole":
            return x
        if self.inputs == "bytes by row":
            return round_to_bytes(x)
        round_part = round_to_bytes if self.inputs == "bytes by group" else round_to_two_bytes
        order = torch.arange(self.num_columns, device=x.device)
        if self.order is not None:
            order = self.order.long()
        width = self.group * max(1, self.find_span())
        parts = [round_part(x[:, own]) for own in torch.split(order, width)]
        rounded = torch.empty_like(x)
        rounded[:, order] = torch.cat(parts, 1)
        return rounded

    def leaves(self) -> Sequence[RowSource]:
        """See ``RowSource``."""
        return (self,)

    def find_stack(self) -> PanelStack | None:
        """See ``RowSource``."""
        if self.kind in _CPU_KINDS:
            return None
        offsets = self.offsets
        return PanelStack(
            kind=self.kind,
            codes=self.codes,
            scales=self.scales.in_panels(),
            offsets=None if offsets is None else offsets.in_panels(),
            has_zeros=offsets is not None and offsets.are_zeros,
            order=None if self.order is None else self.order[None],
            group=self.group,
            span=max(1, self.find_span()),
            # Floats hold two bytes' values.
            inputs="whole" if self.inputs == "two bytes by group" else self.inputs,
            out_size=self.num_rows,
            in_size=self.num_columns,
        )

    def write_rows(self, start: int, out: torch.Tensor) -> None:
        """See ``RowSource``; every value is rounded once."""
        stop = start + out.shape[0]
        first, last = start // PANEL, -(-stop // PANEL)

        def take(values: torch.Tensor) -> torch.Tensor:
            rows = values[first:last].transpose(1, 2).flatten(0, 1)
            return rows[start - first * PANEL : stop - first * PANEL]

        values = self._widen(take)
        if self.order is None:
            out.copy_(values)
        else:
            out[:, self.order.long()] = values

    def _widen(self, take: _Change) -> torch.Tensor:
        """Return the values of the rows that ``take`` takes of packed tensors."""
        codes = widen_words(take(self.codes), self.kind)[:, : self.num_columns]
        scales = self.scales.map(take)
        factors = _spread(scales.widen(), self.group, self.num_columns)
        if self.offsets is None:
            return codes * factors
        shift = self.offsets.map(take)
        wide = shift.widen()
        if shift.are_zeros:
            wide = -wide * scales.widen()
        offsets = _spread(wide, self.group, self.num_columns)
        # Exact in fp64, so rounded once, as by a fused product.
        return (codes.double() * factors.double() + offsets.double()).float()


def round_to_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 rows [T, n] rounded to 255 steps, the largest the 127th; ties to even.

    A row that holds what is no number is none; one of next to nothing is zero.
    """
    peaks = x.abs().amax(1, keepdim=True)
    codes = _round_by(x, _BYTE_MAX, peaks)
    rounded = torch.where(peaks < _LEAST_PEAK, 0.0, codes * (peaks / _BYTE_MAX))
    return torch.where(peaks.isfinite(), rounded, torch.nan)


def round_to_two_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 rows [T, n] rounded to bytes, and what that leaves to 254ths of their step."""
    high = round_to_bytes(x)
    steps = x.abs().amax(1, keepdim=True) / _BYTE_MAX
    low = _round_by(x - high, 2.0 * _BYTE_MAX, steps) * (steps / (2 * _BYTE_MAX))
    # Rows of next to nothing are zero, and have no steps.
    return torch.where((high == 0).all(1, keepdim=True), 0.0, high + low)


def _round_by(x: torch.Tensor, parts: float, wholes: torch.Tensor) -> torch.Tensor:
    """Returns how many of a whole's so many parts values are, ties to even."""
    # A number divided by a tensor would be its reciprocal's multiple, which is rounded twice.
    return (x * (torch.full_like(wholes, parts) / wholes)).round()


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Return an uninitialised tensor: in huge pages, if it is a processor's and fills one.

    A product reads a matrix from end to end, and every small page on the way is looked up.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    is_near = device is None or device.type == "cpu"
    if not is_near or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return _view_bytes(map_huge_pages(num_bytes), 0, shape, dtype)


def allocate_beside(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Return an uninitialised tensor, in huge pages together with others that live as long.

    The matrices of small models and all scales are smaller than one such page.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _SHARED_PAGES.allocate(shape, dtype)


class _SharedPages:
    """Memory of huge pages that tensors lie in side by side.

    Owns: nothing; a piece of memory is its tensors' and goes with the last of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            pages = None if self._pages is None else self._pages()
            start = -(-self._used // _LINE_BYTES) * _LINE_BYTES
            if pages is None or start + num_bytes > len(pages):
                start, pages = 0, map_huge_pages(max(num_bytes, _SHARED_BYTES))
                self._pages = weakref.ref(pages)
            self._used = start + num_bytes
            return _view_bytes(pages, start, shape, dtype)


_SHARED_PAGES = _SharedPages()


def _view_bytes(
    memory: mmap.mmap, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    count = math.prod(shape)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def pack_panels(rows: torch.Tensor) -> torch.Tensor:
    """Return [rows, n] as [panels, n, 64], the last panel filled up with zeros."""
    num_rows, width = rows.shape
    num_panels = -(-num_rows // PANEL)
    packed = allocate_beside((num_panels, width, PANEL), rows.dtype, rows.device)
    whole = num_rows // PANEL
    packed[:whole] = rows[: whole * PANEL].reshape(whole, PANEL, width).transpose(1, 2)
    if whole < num_panels:
        rest = rows[whole * PANEL :]
        packed[whole].zero_()
        packed[whole, :, : len(rest)] = rest.T
    return packed


def widen_words(words: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Return the fp32 values [rows, codes] of words [rows, n], whole units."""
    if kind == "int8":
        return view_as(words, torch.int8).float()
    if kind == "e4m3":
        return view_as(words, torch.float8_e4m3fn).float()
    if kind == "int6":
        return _unpack_six_bits(words).float() - SIX_BIT_LIFT
    if kind in LOW_BIT_KINDS:
        return widen_low_bits(words, kind)
    table = torch.tensor(_TABLES[kind], device=words.device)
    return table[unpack_nibbles(view_as(words, torch.uint8)).int()]


def unpack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return uint8 [..., 2n] of bytes [..., n], the low nibble of each first."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return words int32 [rows, ceil(n / 8)] of codes 0 to 15, uint8 [rows, n]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return view_as(padded[:, ::2] | (padded[:, 1::2] << 4), torch.int32)


def pack_six_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return words int32 [rows, 3 * ceil(n / 16)] of codes 0 to 63, uint8 [rows, n]: values + 32.

    Of sixteen codes the low nibbles are two words, as of four bits. Byte b of the third holds, from
    its lowest bits, the high pairs of codes 2b, 2b + 1, 8 + 2b and 9 + 2b.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 16))
    low = pack_nibbles(padded & 15).view(len(codes), -1, 2)
    pairs = (padded >> 4).view(len(codes), -1, 2, 4, 2)
    high = pairs[:, :, 0, :, 0] | (pairs[:, :, 0, :, 1] << 2)
    high |= (pairs[:, :, 1, :, 0] << 4) | (pairs[:, :, 1, :, 1] << 6)
    return torch.cat([low, view_as(high, torch.int32)], 2).flatten(1)


def _unpack_six_bits(words: torch.Tensor) -> torch.Tensor:
    """Returns codes 0 to 63, uint8 [rows, 16 * n], of words [rows, 3 * n]."""
    stored = view_as(words, torch.uint8).view(len(words), -1, 12)
    high = stored[..., 8:, None]
    halves = [high >> shift & 3 for shift in (0, 2, 4, 6)]
    pairs = torch.cat([torch.cat(halves[:2], -1), torch.cat(halves[2:], -1)], 2).flatten(2)
    return (unpack_nibbles(stored[..., :8]) | (pairs << 4)).flatten(1)


def pack_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return words int32 [rows, ceil(n / 4)] of bytes [rows, n]."""
    return view_as(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)), torch.int32)


def _spread(values: torch.Tensor, fan: int, width: int) -> torch.Tensor:
    """Return each column ``fan`` times, cut to ``width`` columns."""
    return values.repeat_interleave(fan, 1)[:, :width]


def _check_numbers(name: str, what: str, part: GroupValues) -> None:
    for tensor in (part.values if part.part == "whole" else None, part.factors):
        if tensor is None:
            continue
        if tensor.dtype == torch.uint8:
            is_bad = tensor == _E8M0_NAN
        elif tensor.dtype == torch.float8_e4m3fn:
            is_bad = (tensor.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN
        else:
            is_bad = ~tensor.isfinite()
        if is_bad.any():
            row, group = is_bad.nonzero()[0].tolist()
            raise CheckpointError(
                f"{name}: {int(is_bad.sum())} {what}s are no number, the first in row {row}, "
                f"group {group}: download it again."
            )
