"""Products with packed matrices against the torch reference, which decodes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerators.comparing import assert_near
from tests.accelerators.test_elementwise import random
from tests.native.test_panels import CASES, decode, make_packed
from vllm.model_executor.layers.quantization.low_bit_words import LOW_BIT_KINDS
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import PackedRows
from vllm.model_executor.layers.quantization.stacking import stack_stored
from vllm.model_executor.layers.quantization.storages import (
    Fp4Groups,
    Fp8Blocks,
    PlainRows,
    StackedRows,
)
from vllm.v1.attention.ops import decoder
from vllm.v1.attention.ops import stored_products as by_torch
from vllm.v1.attention.ops.stored import CodeKind, GatedExperts, Inputs, RowSource
from vllm.v1.attention.ops.triton.launch import launching_by, run_kernel
from vllm.v1.attention.ops.triton.registry import get_triton_op

pytestmark = pytest.mark.slow


@contextmanager
def count_launches() -> Iterator[list[str]]:
    """Collects the names of the kernels that are launched inside."""
    names: list[str] = []

    def run(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        names.append(kernel.fn.__name__)
        run_kernel(kernel, grid, args, options)

    with launching_by(run):
        yield names


# Codes of six bits and FP8 panels are kept by CPUs alone.
# What accelerators keep in other codes.
CPU_KINDS = LOW_BIT_KINDS | {"int6", "e4m3", "odd4"}
DEVICE_CASES = [case for case in CASES if case[0] not in CPU_KINDS]
FORMS: list[Inputs] = ["whole", "bytes by row", "bytes by group"]
linear, grouped_linear = get_triton_op("stored_linear"), get_triton_op("stored_grouped_linear")
read_rows = get_triton_op("read_stored_rows")


@pytest.mark.parametrize("case", DEVICE_CASES, ids="-".join)
def test_every_code_is_decoded_exactly(case: tuple[CodeKind, str, str]) -> None:
    kind, scales, offsets = case
    for width, group, is_ordered in ((264, 32, False), (100, 104, True)):
        source = make_packed(kind, 70, width, group, scales, offsets, is_ordered=is_ordered)
        expected = decode(source)
        ids = torch.tensor([69, 0, 64, 63, 64])
        # A sum of two is rounded once more in a kernel than in the reference.
        bound = 2e-7 * float(expected.abs().max()) if offsets != "none" else 0.0
        torch.testing.assert_close(read_rows(source, ids), expected[ids], rtol=0, atol=bound)
        found = linear(torch.eye(width)[-70:], source).t()
        torch.testing.assert_close(found, expected[:, -70:], rtol=0, atol=bound)


@settings(max_examples=12)
@given(
    num_inputs=st.integers(0, 70),
    rows=st.integers(1, 140),
    width=st.sampled_from([1, 8, 31, 256, 264, 300]),
    group=st.sampled_from([8, 16, 32, 104, 128, 1024]),
    case=st.sampled_from(DEVICE_CASES),
    inputs=st.sampled_from(FORMS),
    is_ordered=st.booleans(),
)
def test_products(
    num_inputs: int,
    rows: int,
    width: int,
    group: int,
    case: tuple[CodeKind, str, str],
    inputs: Inputs,
    is_ordered: bool,
) -> None:
    source = make_packed(case[0], rows, width, group, *case[1:], is_ordered=is_ordered, seed=rows)
    # No whole numbers: the loader rounds no inputs for them.
    source.inputs = "whole" if case[0] == "nf4" else inputs
    x = random(width, num_inputs, width)
    if num_inputs > 1:
        x[1] = 0
    # Sums of many products of either sign: what is left may be small beside its parts.
    assert_near(linear(x, source), by_torch.stored_linear(x, source))
    narrow = x.bfloat16()
    expected = by_torch.stored_linear(narrow, source)
    assert_near(linear(narrow, source), expected)


@pytest.mark.parametrize(("inputs", "group"), [("whole", 128), ("bytes by group", 64)])
def test_sums_in_parts(inputs: Inputs, group: int) -> None:
    """Of few rows each part is a program's; of many one program takes all, in the same order."""
    width = 3000
    source = make_packed("int4", 70, width, group, "f16", "zeros", is_ordered=inputs == "whole")
    source.inputs = inputs
    x = random(1, 40, width)
    many = linear(x, source)
    assert_near(many, by_torch.stored_linear(x, source))
    for rows in (slice(0, 1), slice(3, 19)):
        with count_launches() as names:
            assert torch.equal(linear(x[rows], source), many[rows])
        assert "_join_splits_kernel" in names


@pytest.mark.parametrize("inputs", FORMS)
def test_what_is_no_number_stays_none(inputs: Inputs) -> None:
    source = make_packed("int8", 10, 64, 32)
    source.inputs = inputs
    x = random(1, 3, 64)
    x[0, 5], x[2, 40] = torch.nan, torch.inf
    found = linear(x, source)
    assert not found[[0, 2]].isfinite().any()
    assert_near(found[1:2], by_torch.stored_linear(x[1:2], source))


def make_fp8(rows: int, width: int) -> Fp8Blocks:
    stored = Fp8Blocks(rows, width, (16, 32), random(7, -(-rows // 16), -(-width // 32)).abs())
    stored.codes.copy_(torch.randint(0, 126, stored.codes.shape, dtype=torch.uint8))
    return stored


def test_parts_of_every_storage_are_one_product() -> None:
    fp4 = Fp4Groups(9, 64, 16, random(8, 9, 4).abs())
    fp4.codes.copy_(torch.randint(0, 256, fp4.codes.shape, dtype=torch.uint8))
    rounded = make_packed("int4", 30, 64, 32, seed=9)
    rounded.inputs = "bytes by group"
    stack = StackedRows(
        PlainRows(random(1, 5, 64)),
        make_fp8(40, 64),
        PlainRows(random(2, 0, 64)),
        StackedRows(fp4, rounded),
        PlainRows(random(3, 7, 64, dtype=torch.bfloat16)),
    )
    x = random(4, 11, 64)
    assert_near(linear(x, stack), by_torch.stored_linear(x, stack))
    # A row's bits do not depend on its batch.
    assert torch.equal(linear(x[3:4], stack)[0], linear(x, stack)[3])


@pytest.mark.parametrize("num_inputs", [0, 5])
def test_groups(num_inputs: int) -> None:
    sources = [
        make_packed("int4", 192, 64, 32),
        make_packed("int4", 96, 64, 32),  # panels of two groups
        make_fp8(96, 64),
        make_fp8(72, 64),  # blocks of two groups
        PlainRows(random(5, 12, 64)),
    ]
    for source in sources:
        x = random(6, num_inputs, 3, 64)
        expected = by_torch.stored_grouped_linear(x, source, 3)
        assert_near(grouped_linear(x, source, 3), expected)


def pack(source: PackedRows) -> PackingStorage:
    storage = PackingStorage(source.num_rows, source.num_columns, {}, lambda _: None)  # type: ignore[arg-type,return-value]
    storage._packed = source
    return storage


def make_experts(form: str, height: int, seed: int) -> list[RowSource]:
    """Returns an expert's [height, 64], [height, 64] and [64, height]."""
    matrices: list[RowSource] = []
    for index, (rows, width) in enumerate([(height, 64), (height, 64), (64, height)]):
        number = seed + index
        if form == "fp8":
            fp8 = Fp8Blocks(rows, width, (8, 32), random(number, rows // 8, -(-width // 32)).abs())
            fp8.codes.copy_(torch.randint(0, 126, fp8.codes.shape, dtype=torch.uint8))
            matrices.append(fp8)
        elif form == "fp4":
            fp4 = Fp4Groups(rows, width, 8, random(number, rows, width // 8).abs())
            fp4.codes.copy_(torch.randint(0, 256, fp4.codes.shape, dtype=torch.uint8))
            matrices.append(fp4)
        elif form == "nvfp4":
            # Every matrix has a scale of its own.
            own = make_packed("e2m1", rows, width, 16, "e4m3", seed=number)
            assert own.scales.steps is not None
            matrices.append(pack(own))
        else:
            is_ordered = form == "in order of weights"
            own = make_packed(
                "int4", rows, width, 8, "f16", "zeros", is_ordered=is_ordered, seed=number
            )
            matrices.append(pack(own))
    return matrices


@pytest.mark.parametrize("form", ["fp8", "fp4", "nvfp4", "in order of weights", "of odd width"])
def test_experts_of_any_storage_are_one_product(form: str) -> None:
    num_experts, height = 3, 40
    matrices = [make_experts(form, height, 10 * expert) for expert in range(num_experts)]
    gates_and_ups = [matrix for own in matrices for matrix in own[:2]]
    x, ids = random(1, 9, 64), torch.randint(0, num_experts, (9, 2))
    weights = random(2, 9, 2).abs()

    def run_expert(rows: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up, down = matrices[expert]
        both = torch.cat([by_torch.stored_linear(rows, part) for part in (gate, up)], 1)
        return by_torch.stored_linear(decoder.silu_and_mul(both), down)

    expected = decoder.run_experts(x, ids, weights, run_expert)
    gate_up = stack_stored(gates_and_ups, num_experts)
    down = stack_stored([own[2] for own in matrices], num_experts)
    assert gate_up is not None
    assert down is not None
    stacks = GatedExperts(gate_up, down, decoder.silu_and_mul)
    assert_near(get_triton_op("run_experts")(x, ids, weights, run_expert, stacks), expected)
    # The matrices lie in the stacks now.
    assert torch.equal(decoder.run_experts(x, ids, weights, run_expert), expected)
    assert len({own.untyped_storage().data_ptr() for own in find_codes(gates_and_ups)}) == 1


def find_codes(sources: list[RowSource]) -> list[torch.Tensor]:
    packed = [s.packed if isinstance(s, PackingStorage) else s for s in sources]
    return [own.codes for own in packed if isinstance(own, PackedRows | Fp8Blocks | Fp4Groups)]


def test_rows_of_any_storage() -> None:
    ids = torch.tensor([3, 0, 3])
    for source in (PlainRows(random(1, 5, 64, dtype=torch.bfloat16)), make_fp8(40, 64)):
        assert torch.equal(read_rows(source, ids), by_torch.read_stored_rows(source, ids))
