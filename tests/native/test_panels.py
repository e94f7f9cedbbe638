"""Packed matrices: the bits of one order of sums over decoded values, for any number of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.test_library import builds, make_context
from vllm.model_executor.layers.quantization.low_bit_words import LOW_BIT_KINDS
from vllm.model_executor.layers.quantization.panels import (
    CodedRows,
    GroupValues,
    PackedRows,
    pack_bytes,
    pack_nibbles,
    pack_six_bits,
    scale_e4m3,
    unit_of,
)
from vllm.model_executor.layers.quantization.storages import PlainRows, StackedRows
from vllm.native.tensors import TensorBinder
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.ops.stored import CodeKind, RowSource
from vllm.v1.attention.ops.stored_products import read_stored_rows

BINDER = TensorBinder(CacheLayout((), {}), {})
CHAIN = 256
FUSED = [build for build in builds() if build != "portable"]


def make_packed(
    kind: CodeKind,
    rows: int,
    width: int,
    group: int,
    scale_type: str = "f16",
    offset_type: str = "none",
    *,
    is_ordered: bool = False,
    seed: int = 0,
) -> PackedRows:
    """Returns random codes under random scales."""
    generator = torch.Generator().manual_seed(seed)
    bits = {"int8": 8, "e4m3": 8, "int6": 6}.get(kind, 4)
    codes = torch.randint(0, 2**bits, (rows, width), generator=generator).byte()
    if kind == "e4m3":
        codes[codes & 127 == 127] = 0  # no numbers
    pack = {4: pack_nibbles, 6: pack_six_bits, 8: pack_bytes}[bits]
    unit = unit_of(kind)
    if kind in LOW_BIT_KINDS:
        # Any word is one of codes, beyond the width too.
        shape = (rows, unit.count_words(width))
        words = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
    else:
        words = pack(codes)
    group = max(group, unit.num_codes)
    if scale_type == "codes":
        group = unit.num_codes
    num_groups = -(-width // group)

    nibbles = torch.randint(0, 256, (rows, num_groups), generator=generator).byte()

    def draw(kind: str) -> GroupValues:
        values = torch.rand(rows, num_groups, generator=generator) + 0.5
        factors = values[:, ::8].half().contiguous()
        if kind in ("low", "high"):
            return GroupValues(nibbles, factors if kind == "low" else -factors, 8, part=kind)
        if kind == "codes":
            last = words.view(rows, -1, unit.num_words)[..., -1]
            return GroupValues(last, factors, 8, part=kind, step=0.125)
        if kind == "odd":
            small = torch.randint(0, 16, (rows, num_groups), generator=generator) * 2 + 1
            return GroupValues(small.to(torch.int8), factors, 8, step=0.125)
        if kind == "k":
            small = torch.randint(-32, 32, (rows, num_groups), generator=generator).to(torch.int8)
            return GroupValues(small, values[:, ::8].half().contiguous(), 8)
        if kind == "e8m0":
            powers = torch.randint(120, 130, (rows, num_groups), generator=generator)
            return GroupValues(powers.to(torch.uint8))
        if kind == "e4m3":
            stored = torch.randint(0, 127, (rows, num_groups), generator=generator).byte()
            whole = values.flatten()[0] / 300
            codes = stored.view(torch.float8_e4m3fn)
            return scale_e4m3(codes, whole, divides=True)
        if kind == "zeros":
            zeros = torch.randint(-8, 8, (rows, num_groups), generator=generator)
            return GroupValues(zeros.to(torch.int8))
        types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
        return GroupValues(values.to(types[kind]))

    order = torch.randperm(width, generator=generator).int() if is_ordered else None
    offsets = None if offset_type == "none" else draw(offset_type)
    return PackedRows(CodedRows(kind, words, width, group, draw(scale_type), offsets, order), "w")


def decode(source: RowSource) -> torch.Tensor:
    rows = torch.empty(source.num_rows, source.num_columns)
    source.write_rows(0, rows)
    return rows


def multiply_in_order(x: torch.Tensor, source: PackedRows) -> torch.Tensor:
    """The order of sums, spelled out: fused chains over 256 inputs, then a sum over the chains.

    A product of two fp32 numbers is exact in fp64; the sum with a third is rounded there and then
    to fp32, which differs from one rounding in some 1 of 2^29 cases only.
    """
    weight, inputs = decode(source), x
    if source.order is not None:
        inputs, weight = x[:, source.order.long()], weight[:, source.order.long()]
    wide_x, wide_w = inputs.double().numpy(), weight.double().numpy()
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, source.num_columns, CHAIN):
        chain = np.zeros_like(total)
        for k in range(begin, min(begin + CHAIN, source.num_columns)):
            chain = (chain + wide_x[:, k, None] * wide_w[None, :, k]).astype(np.float32)
        total = chain if begin == 0 else total + chain
    return torch.from_numpy(total)


def multiply(build: str, x: torch.Tensor, source: PackedRows, threads: int = 1) -> torch.Tensor:
    output = torch.empty(len(x), source.num_rows)
    make_context(threads, build).matmul(BINDER.rows(source), x, output)
    return output


CASES: list[tuple[CodeKind, str, str]] = [
    ("int4", "f16", "none"),
    ("int4", "bf16", "zeros"),
    ("int4", "f32", "f32"),
    ("uint4", "k", "k"),
    ("uint4", "f16", "f16"),
    ("iq4", "k", "none"),
    ("e2m1", "e8m0", "none"),
    ("e2m1", "e4m3", "none"),
    ("int8", "f32", "none"),
    ("int8", "k", "none"),
    ("int8", "f16", "f16"),
    ("int8", "f16", "zeros"),
    ("int6", "k", "none"),
    ("int6", "f16", "f16"),
    ("e4m3", "f32", "none"),
    ("e4m3", "e8m0", "none"),
    ("nf4", "f32", "none"),
    ("odd4", "k", "none"),
    ("uint2", "low", "high"),
    ("int2", "f16", "none"),
    ("int3", "k", "none"),
    ("iq1", "odd", "none"),
    ("iq2", "odd", "none"),
    ("iq2_xxs", "codes", "none"),
    ("iq3_xxs", "codes", "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize("build", FUSED)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_form_has_the_one_order_of_sums(build: str, case: tuple[CodeKind, str, str]) -> None:
    kind, scales, offsets = case
    for width, group, rows, is_ordered in ((600, 32, 70, False), (100, 112, 130, True)):
        source = make_packed(
            kind, rows, width, group, scales, offsets, is_ordered=is_ordered, seed=width
        )
        x = torch.randn(11, width, generator=torch.Generator().manual_seed(1))
        expected = multiply_in_order(x, source)
        for count in (1, 2, 3, 4, 11):
            got = multiply(build, x[:count], source)
            torch.testing.assert_close(got, expected[:count], atol=0, rtol=1e-7)
            assert (got != expected[:count]).sum() <= 2, "double rounding alone explains few"


@pytest.mark.slow
@pytest.mark.parametrize("build", builds())
@settings(deadline=None, max_examples=25)
@given(
    num_inputs=st.sampled_from([1, 2, 3, 5, 6, 8, 9, 13, 16, 17, 97, 200]),
    rows=st.integers(1, 300),
    width=st.sampled_from([1, 8, 31, 256, 264, 515]),
    group=st.sampled_from([16, 32, 128, 1024]),
    case=st.sampled_from(CASES),
    threads=st.integers(1, 3),
)
def test_a_row_has_the_same_bits_in_any_company(
    build: str,
    num_inputs: int,
    rows: int,
    width: int,
    group: int,
    case: tuple[CodeKind, str, str],
    threads: int,
) -> None:
    source = make_packed(case[0], rows, width, group, *case[1:], seed=rows)
    x = torch.randn(num_inputs, width, generator=torch.Generator().manual_seed(width))
    together = multiply(build, x, source, threads)
    for row in {0, num_inputs // 2, num_inputs - 1}:
        assert torch.equal(multiply(build, x[row : row + 1], source)[0], together[row])
    if build != "portable":
        assert all(torch.equal(multiply(other, x, source), together) for other in FUSED)
    weight = decode(source).double()
    error = (together - x.double() @ weight.T).abs()
    assert (error <= 1e-5 * (x.double().abs() @ weight.abs().T)).all()


def test_values_are_those_of_their_formula() -> None:
    source = make_packed("uint4", 3, 16, 8, "f16", "f16")
    assert source.offsets is not None
    one_hot = torch.eye(16)
    for build in builds():
        assert torch.equal(multiply(build, one_hot, source).T, decode(source))
    words = source.codes[0, :, 1].tolist()
    scales = source.scales.values[0, :, 1].double()
    offsets = source.offsets.values[0, :, 1].double()
    expected = [
        (words[k // 8] >> k % 8 * 4 & 15) * scales[k // 8] + offsets[k // 8] for k in range(16)
    ]
    assert torch.equal(decode(source)[1], torch.stack(expected).float())


def test_rows_are_read_by_number_and_in_parts() -> None:
    for is_ordered in (False, True):
        source = make_packed("int4", 150, 64, 32, "f16", "zeros", is_ordered=is_ordered)
        whole = decode(source)
        part = torch.empty(70, 64)
        source.write_rows(60, part)
        assert torch.equal(part, whole[60:130])
        ids = torch.tensor([149, 0, 64, 63, 64])
        assert torch.equal(read_stored_rows(source, ids), whole[ids])


def test_packed_and_plain_parts_are_one_matrix() -> None:
    parts = (
        make_packed("int4", 70, 64, 32),
        PlainRows(torch.randn(13, 64)),
        make_packed("int8", 200, 64, 64),
    )
    x = torch.randn(7, 64)
    context, stack = make_context(2), StackedRows(*parts)
    output = torch.empty(7, 283)
    context.matmul(BINDER.rows(stack), x, output)
    rows = torch.empty(283, 64)
    stack.write_rows(0, rows)
    torch.testing.assert_close(output, x @ rows.T, atol=1e-3, rtol=1e-5)
    for i in range(7):
        alone = torch.empty(1, 283)
        context.matmul(BINDER.rows(stack), x[i : i + 1], alone)
        assert torch.equal(alone[0], output[i])


@pytest.mark.parametrize("build", builds())
def test_threads_that_share_panels_find_what_one_finds(build: str) -> None:
    # Five panels: two threads take halves, of which some begin within a part's panel.
    parts = make_packed("int4", 70, 520, 32), make_packed("int3", 200, 520, 16, "k")
    stack = StackedRows(*parts)
    matrix = BINDER.rows(stack)
    x = torch.randn(260, 520, generator=torch.Generator().manual_seed(1))
    alone = torch.empty(260, 270)
    make_context(1, build).matmul(matrix, x, alone)
    for count in (5, 9, 10, 17, 260):
        shared = torch.full((count, 270), torch.nan)
        make_context(2, build).matmul(matrix, x[:count], shared)
        assert torch.equal(shared, alone[:count]), count
