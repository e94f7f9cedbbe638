"""Inputs of eight bits: the same bits in every build and company, near what exact sums give."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.test_library import builds, make_context
from tests.native.test_panels import BINDER, CASES, decode, make_packed, multiply
from vllm.model_executor.layers.quantization.panels import (
    CodedRows,
    GroupValues,
    PackedRows,
    widen_words,
)
from vllm.model_executor.layers.quantization.storages import PlainRows, StackedRows
from vllm.v1.attention.ops.stored import CodeKind, Inputs
from vllm.v1.attention.ops.stored_products import stored_linear

BYTE_CASES = [case for case in CASES if case[0] not in ("e4m3", "nf4")]
FORMS: list[Inputs] = ["bytes by row", "bytes by group", "two bytes by group"]


def rounding(source: PackedRows, inputs: Inputs) -> PackedRows:
    source.inputs = inputs
    return source


def find_largest(source: PackedRows) -> float:
    """Returns no less than any product of a code and its scale, plus its offset."""
    # Those in codes are odd and of five bits.
    numbers = 31 if source.scales.part == "codes" else source.scales.values.float().abs().max()
    largest = float(numbers) * source.scales.step * 128
    if source.scales.factors is not None:
        largest *= float(source.scales.factors.abs().max())
    if source.scales.steps is not None:
        largest *= float(source.scales.steps.abs().max())
    if source.offsets is not None:
        wide = float(source.offsets.values.float().abs().max())
        factors = source.offsets.factors
        largest += wide * (largest if factors is None else float(factors.abs().max()))
    return largest


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    num_inputs=st.sampled_from([1, 2, 3, 5, 6, 7, 9, 13, 97, 200]),
    rows=st.integers(1, 300),
    width=st.sampled_from([1, 8, 31, 256, 264, 515]),
    group=st.sampled_from([16, 32, 128, 1024]),
    case=st.sampled_from(BYTE_CASES),
    inputs=st.sampled_from(FORMS),
    is_ordered=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_row_has_the_same_bits_in_any_company_and_build(
    num_inputs: int,
    rows: int,
    width: int,
    group: int,
    case: tuple[CodeKind, str, str],
    inputs: Inputs,
    is_ordered: bool,
    threads: int,
) -> None:
    made = make_packed(case[0], rows, width, group, *case[1:], is_ordered=is_ordered, seed=rows)
    source = rounding(made, inputs)
    x = torch.randn(num_inputs, width, generator=torch.Generator().manual_seed(width))
    together = multiply("portable", x, source)
    for build in builds():
        assert torch.equal(multiply(build, x, source, threads), together), build
        for row in {0, num_inputs // 2, num_inputs - 1}:
            assert torch.equal(multiply(build, x[row : row + 1], source)[0], together[row]), build
    weight, rounded = decode(source).double(), source.round_inputs(x).double()
    error = (together - rounded @ weight.T).abs()
    # Codes and zero points are multiplied apart: their products may cancel.
    assert (error <= 1e-6 * find_largest(source) * rounded.abs().sum(1, keepdim=True)).all()


# Blocks of GGUF's types: a row alone meets the first five with scales widened where they are met.
BLOCK_CASES: list[tuple[CodeKind, int, str, str]] = [
    ("uint4", 32, "f16", "f16"),
    ("int6", 32, "f16", "none"),
    ("int6", 32, "f16", "f16"),
    ("int6", 16, "k", "none"),
    ("int6", 32, "k", "k"),
    ("uint4", 32, "k", "k"),
]


@pytest.mark.parametrize("inputs", FORMS)
@pytest.mark.parametrize("case", BLOCK_CASES, ids=str)
def test_a_row_alone_meets_whole_blocks(
    case: tuple[CodeKind, int, str, str], inputs: Inputs
) -> None:
    kind, group, *numbers = case
    for width, rows in ((32, 3), (640, 70), (1056, 130)):
        source = rounding(make_packed(kind, rows, width, group, *numbers, seed=width), inputs)
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(7))
        x[2] = 0.0
        x[3, : width // 2] *= 1e4
        together = multiply("portable", x, source)
        for build in builds():
            assert torch.equal(multiply(build, x, source), together), build
            for row in range(4):
                alone = multiply(build, x[row : row + 1], source, threads=2)
                assert torch.equal(alone[0], together[row]), (build, width, row)


@pytest.mark.parametrize("inputs", FORMS)
def test_every_code_meets_every_place_of_a_word(inputs: Inputs) -> None:
    for kind in ("int8", "int4", "uint4", "iq4", "e2m1", "int6"):
        source = rounding(make_packed(kind, 64, 48, 16, "f32", "none"), inputs)
        if kind == "uint4":
            source = rounding(make_packed(kind, 64, 48, 16, "f32", "f32"), inputs)
        one_hot = torch.eye(48)
        for build in builds():
            got = multiply(build, one_hot, source).T
            torch.testing.assert_close(got, decode(source), atol=0, rtol=3e-7)


@pytest.mark.parametrize("inputs", FORMS)
def test_every_low_code_meets_every_place_of_a_unit(inputs: Inputs) -> None:
    for case in CASES[CASES.index(("odd4", "k", "none")) :]:
        source = rounding(make_packed(case[0], 64, 96, 32, *case[1:]), inputs)
        one_hot = torch.eye(96)
        for build in builds():
            got = multiply(build, one_hot, source).T
            torch.testing.assert_close(got, decode(source), atol=1e-5, rtol=3e-7)


Array = npt.NDArray[np.float32]


def multiply_by_spans(x: torch.Tensor, source: PackedRows) -> torch.Tensor:
    """The order of sums where scales are whole numbers, spelled out: those of a span are whole."""

    def take(values: torch.Tensor) -> torch.Tensor:
        return values.transpose(1, 2).flatten(0, 1)[: source.num_rows]

    def numbers(part: GroupValues) -> tuple[torch.Tensor, Array]:
        own = part.map(take)
        assert own.factors is not None
        whole = replace(own, factors=None, step=1.0).widen().long()
        return whole, own.factors.float().numpy() * np.float32(own.step)

    codes = widen_words(take(source.codes), source.kind)[:, : source.num_columns].long()
    parts = [numbers(part) for part in (source.scales, source.offsets) if part is not None]
    width = source.group * source.find_span()
    total = np.zeros((len(x), source.num_rows), np.float32)
    for begin in range(0, source.num_columns, width):
        own = x[:, begin : begin + width].numpy()
        peaks = np.abs(own).max(1, keepdims=True)
        scale = peaks / np.float32(127)
        whole = torch.from_numpy(np.rint(own * (np.float32(127) / peaks))).long()
        for part, (values, factors) in enumerate(parts):
            all_sums = torch.zeros(len(x), source.num_rows, dtype=torch.long)
            for at in range(0, whole.shape[1], source.group):
                inputs = whole[:, at : at + source.group]
                met = codes[:, begin + at : begin + at + source.group]
                sums = inputs @ met.T if part == 0 else inputs.sum(1, keepdim=True)
                all_sums += sums * values[:, (begin + at) // source.group]
            steps = factors[:, begin // source.group // source.scales.fan] * scale
            wide = all_sums.numpy().astype(np.float32).astype(np.float64) * steps
            total = (wide + total).astype(np.float32)
    return torch.from_numpy(total)


SPAN_CASES: list[tuple[CodeKind, int, str, str]] = [
    ("uint2", 16, "low", "high"),
    ("int3", 16, "k", "none"),
    ("odd4", 32, "odd", "none"),
    ("iq1", 16, "odd", "none"),
    ("iq2", 16, "odd", "none"),
    ("iq2_xxs", 32, "codes", "none"),
    ("iq3_xxs", 32, "codes", "none"),
    ("int3", 256, "k", "none"),
]


@pytest.mark.parametrize("case", SPAN_CASES, ids=str)
def test_sums_of_whole_scales_are_whole(case: tuple[CodeKind, int, str, str]) -> None:
    kind, group, *numbers = case
    # Whole spans; and such as end within a group.
    for width in (1024, 1128):
        made = make_packed(kind, 70, width, group, *numbers, seed=width)
        source = rounding(made, "bytes by group")
        # Of eight groups a factor, those of 1,024 inputs at most.
        assert source.find_span() == min(8, 1024 // group)
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(3))
        expected = multiply_by_spans(x, source)
        for build in builds():
            for count in (1, 5):
                got = multiply(build, x[:count], source)
                torch.testing.assert_close(got, expected[:count], atol=1e-4, rtol=1e-5)
                assert (got != expected[:count]).sum() <= 2, "double rounding alone explains few"


@pytest.mark.parametrize("case", SPAN_CASES[:2], ids=str)
@pytest.mark.parametrize("word", [0, -1])
def test_sums_of_sixteen_inputs_fit_where_they_are_largest(
    case: tuple[CodeKind, int, str, str], word: int
) -> None:
    kind, group, *numbers = case
    made = make_packed(kind, 64, 512, group, *numbers)
    made.codes.fill_(word)
    # The lowest scales that are signed; else the highest, and the highest offsets.
    made.scales.values.fill_(-32 if kind == "int3" else 255)
    source = rounding(made, "bytes by group")
    x = torch.tensor([1.0, -1.0])[:, None].expand(2, 512).contiguous()
    expected = x @ decode(source).T
    for build in builds():
        got = torch.cat([multiply(build, x[:1], source), multiply(build, x[1:], source)])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


def test_two_bytes_are_two_hundred_times_nearer() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(5))
    x[0] *= torch.logspace(-6, 3, 512)
    for kind, group, numbers in (("int4", 32, ("f16", "none")), ("uint2", 16, ("low", "high"))):
        made = make_packed(kind, 70, 512, group, *numbers)
        step = x.abs().amax(1, keepdim=True) / 127
        for inputs, most in (("bytes by group", 0.501), ("two bytes by group", 0.00199)):
            source = rounding(made, inputs)
            assert ((source.round_inputs(x) - x).abs() <= most * step).all()
            expected = source.round_inputs(x).double() @ decode(source).double().T
            for build in builds():
                got = multiply(build, x, source)
                sizes = x.double().abs() @ decode(source).double().abs().T
                assert ((got - expected).abs() <= 2e-6 * sizes).all()


@pytest.mark.parametrize("inputs", FORMS)
def test_rounding_at_its_edges(inputs: Inputs) -> None:
    source = rounding(make_packed("int8", 3, 8, 8, "f32"), inputs)
    weight = decode(source)
    rows = {
        "zeros": torch.zeros(8),
        "minus zeros": -torch.zeros(8),
        "next to nothing": torch.full((8,), 1e-38),
        "ties go to even": torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]),
        "infinite": torch.tensor([1.0, float("inf"), 0, 0, 0, 0, 0, 0]),
        "no number": torch.tensor([1.0, 2.0, float("nan"), 0, 0, 0, 0, 0]),
        "huge": torch.full((8,), 3e38),
    }
    x = torch.stack(list(rows.values()))
    ties = torch.tensor([127.0, 0, 2, 2, 0, -2, -2, 126])
    if inputs == "two bytes by group":
        ties = rows["ties go to even"]
    for build in builds():
        got = dict(zip(rows, multiply(build, x, source), strict=True))
        for name in ("zeros", "minus zeros", "next to nothing"):
            assert torch.equal(got[name], torch.zeros(3)), name
        torch.testing.assert_close(got["ties go to even"], weight @ ties, atol=1e-3, rtol=1e-6)
        assert got["infinite"].isnan().all()
        assert got["no number"].isnan().all()
        assert not got["huge"].isnan().any()


def test_parts_that_round_otherwise_are_one_matrix() -> None:
    parts = (
        rounding(make_packed("int4", 70, 64, 32), "bytes by group"),
        PlainRows(torch.randn(13, 64, generator=torch.Generator().manual_seed(2))),
        rounding(make_packed("int8", 200, 64, 64), "bytes by row"),
        rounding(make_packed("int4", 64, 64, 32, is_ordered=True), "bytes by group"),
        rounding(make_packed("int4", 30, 64, 32, seed=9), "bytes by group"),
        make_packed("uint4", 40, 64, 32, "f16", "f16"),
    )
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    stack = StackedRows(*parts)
    output, context = torch.empty(7, stack.num_rows), make_context(2)
    context.matmul(BINDER.rows(stack), x, output)
    alone = []
    for part in parts:
        alone.append(torch.empty(7, part.num_rows))
        context.matmul(BINDER.rows(part), x, alone[-1])
    assert torch.equal(output, torch.cat(alone, 1))
    # Held to what exact sums give: torch adds in another order on every processor.
    inputs = [part.round_inputs(x).double() for part in parts]
    weights = [decode(part).double() for part in parts]
    exact = torch.cat([own @ weight.T for own, weight in zip(inputs, weights, strict=True)], 1)
    sizes = [own.abs() @ weight.abs().T for own, weight in zip(inputs, weights, strict=True)]
    for got in (output, stored_linear(x, stack)):
        assert ((got - exact).abs() <= 1e-6 * torch.cat(sizes, 1)).all()


def test_rows_of_several_blocks_are_those_they_are_alone() -> None:
    # 64 inputs: blocks of 512 rows and less; parts that end within a panel.
    parts = [
        rounding(make_packed("int4", 70, 64, 32), "bytes by group"),
        rounding(make_packed("int8", 100, 64, 64), "bytes by row"),
        rounding(make_packed("uint4", 40, 64, 16, "f16", "f16"), "bytes by group"),
    ]
    stack = StackedRows(*parts)
    x = torch.randn(1030, 64, generator=torch.Generator().manual_seed(4))
    for build in builds():
        output, context = torch.empty(1030, stack.num_rows), make_context(2, build)
        context.matmul(BINDER.rows(stack), x, output)
        for row in (0, 343, 344, 511, 512, 515, 516, 1029):
            alone = torch.empty(1, stack.num_rows)
            context.matmul(BINDER.rows(stack), x[row : row + 1], alone)
            assert torch.equal(output[row], alone[0]), (build, row)
        # Three threads share four panels better in halves of a block.
        halves = torch.empty(200, stack.num_rows)
        make_context(3, build).matmul(BINDER.rows(stack), x[:200], halves)
        assert torch.equal(halves, output[:200]), build


def test_groups_beyond_a_sum_of_32_bits_take_inputs_whole() -> None:
    for width, expected in ((1 << 17, "bytes by row"), ((1 << 17) + 8, "whole")):
        words, scales = torch.zeros(1, width // 4).int(), GroupValues(torch.ones(1, 1))
        rows = CodedRows("int8", words, width, 1 << 20, scales)
        assert PackedRows(rows, "w", "bytes by row").inputs == expected


def test_groups_too_wide_for_whole_scales_take_inputs_whole() -> None:
    # Of codes that have no other sums. Those of four bits and more add group by group.
    for kind, expected in (("int3", "whole"), ("int6", "bytes by group")):
        source = make_packed(kind, 3, 2048, 2048, "k")
        again = PackedRows.of_parts(source.parts, "bytes by group")
        assert (again.find_span(), again.inputs) == (0, expected)
