"""Products of stored weights, routers and experts against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerators.comparing import assert_near
from tests.accelerators.test_elementwise import random
from vllm.model_executor.layers.quantization.decode import decode_fp4_groups, decode_fp8_blocks
from vllm.v1.attention.ops import decoder, reference
from vllm.v1.attention.ops.stored import (
    FP4_GROUPS,
    FP8_BLOCKS,
    INT8_ROWS,
    GatedExperts,
    StoredStack,
)
from vllm.v1.attention.ops.triton import products
from vllm.v1.attention.ops.triton.experts import mix_gated_experts
from vllm.v1.attention.ops.triton.registry import get_triton_op
from vllm.v1.attention.ops.triton.routing import Splits, choose_splits

pytestmark = pytest.mark.slow

few = settings(max_examples=6)


def bytes_of(seed: int, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def test_every_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    numbers = codes.clone()
    numbers[(codes & 0x7F) == 0x7F] = 0
    one = torch.full((1, 1), 127, dtype=torch.uint8)
    # A row that picks one column gives that column's value.
    fp8 = StoredStack(FP8_BLOCKS, numbers[None], one[None], (1, 256))
    expected = torch.empty(1, 256)
    decode_fp8_blocks(numbers, one, (1, 256), 0, expected)
    assert torch.equal(products.stack_linear(torch.eye(256), fp8).t(), expected)
    scales = bytes_of(1, 1, 16, high=255)
    fp4 = StoredStack(FP4_GROUPS, codes[None], scales[None], (1, 32))
    expected = decode_fp4_groups(codes, scales, 32)
    assert torch.equal(products.stack_linear(torch.eye(512), fp4).t(), expected)


@few
@given(st.integers(0, 70), st.integers(1, 90), st.integers(1, 90), st.booleans())
def test_fp8_blocks(rows: int, outs: int, ins: int, has_byte_scales: bool) -> None:
    codes = bytes_of(1, outs, ins)
    codes[(codes & 0x7F) == 0x7F] = 1
    shape = (-(-outs // 16), -(-ins // 32))
    scales = bytes_of(2, *shape, low=115, high=135) if has_byte_scales else random(3, *shape)
    decoded = torch.empty(outs, ins)
    block = (min(16, outs), min(32, ins))
    decode_fp8_blocks(codes, scales, block, 0, decoded)
    stack = StoredStack(FP8_BLOCKS, codes[None], scales[None], block)
    x = random(4, rows, ins)
    assert_near(products.stack_linear(x, stack), reference.linear(x, decoded))


@few
@given(st.integers(0, 70), st.integers(1, 90), st.integers(1, 3))
def test_narrow_weights_and_types(rows: int, outs: int, groups: int) -> None:
    ins = 32 * groups
    x = random(1, rows, ins)
    codes, scales = bytes_of(2, outs, ins // 2), bytes_of(3, outs, groups, low=115, high=135)
    decoded = decode_fp4_groups(codes, scales, 32)
    fp4 = StoredStack(FP4_GROUPS, codes[None], scales[None], (1, 32))
    assert_near(products.stack_linear(x, fp4), reference.linear(x, decoded))
    whole = bytes_of(4, outs, ins).view(torch.int8)
    steps = random(5, outs, 1).abs()
    int8 = StoredStack(INT8_ROWS, whole[None], steps[None], (1, ins))
    assert_near(products.stack_linear(x, int8), reference.linear(x, whole * steps))
    plain = random(6, outs, ins, dtype=torch.bfloat16)
    found = get_triton_op("project_to_logits")(x.bfloat16(), plain)
    assert_near(found, reference.linear(x.bfloat16().float(), plain.float()))


def test_sums_in_parts() -> None:
    """Of few rows each part is a program's; of many one program takes all, in the same order."""
    codes = bytes_of(1, 20, 3000, high=126)
    stack = StoredStack(FP8_BLOCKS, codes[None], random(2, 2, 30).abs()[None], (16, 100))
    decoded = torch.empty(20, 3000)
    decode_fp8_blocks(codes, stack.scales[0], (16, 100), 0, decoded)
    x = random(3, 40, 3000)
    many = products.stack_linear(x, stack)
    assert_near(many, reference.linear(x, decoded))
    wide = torch.zeros(16, 23)
    for rows in (slice(0, 1), slice(5, 21)):
        assert torch.equal(products.stack_linear(x[rows], stack), many[rows])
    products.stack_linear(x[:16], stack, out=wide[:, :20])
    assert torch.equal(wide[:, :20], many[:16])
    assert not wide[:, 20:].any()


def test_only_few_rows_of_a_narrow_matrix_are_split_among_programs() -> None:
    def choose(num_rows: int, num_blocks: int, num_steps: int, is_invariant: bool = True) -> Splits:
        return choose_splits(num_rows, num_blocks, num_steps, is_invariant=is_invariant)

    assert choose(1, 64, 32) == Splits(8, 4, are_programs=True)
    assert choose(17, 64, 32) == Splits(8, 4)
    # Enough blocks of outputs, or too little to sum.
    assert choose(1, 512, 32) == Splits(1, 32)
    assert choose(1, 64, 7) == Splits(1, 7)
    # No part is empty.
    assert choose(1, 1, 45) == Splits(9, 5, are_programs=True)
    assert choose(1, 64, 34) == Splits(7, 5, are_programs=True)


@few
@given(st.integers(1, 40), st.integers(1, 20), st.data())
def test_routers(rows: int, num_experts: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(1, num_experts))
    logits = 8 * random(1, rows, num_experts)
    for normalises in (False, True):
        ids, weights = get_triton_op("choose_by_softmax")(logits, chosen, normalises)
        expected = decoder.choose_by_softmax(logits, chosen, normalises)
        assert torch.equal(ids, expected[0])
        assert_near(weights, expected[1])
    scores = reference.router_scores(logits * 4)
    assert_near(get_triton_op("router_scores")(logits * 4), scores)
    bias = random(2, num_experts)
    ids = get_triton_op("choose_experts")(scores, bias, chosen)
    expected_ids = reference.choose_experts(scores, bias, chosen)
    assert torch.equal(ids.sort(1).values, expected_ids.sort(1).values)


def test_of_equal_experts_the_first_is_chosen() -> None:
    ids, _ = get_triton_op("choose_by_softmax")(torch.zeros(3, 7), 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 3


@few
@given(st.integers(0, 80), st.integers(1, 6), st.data())
def test_experts(rows: int, num_experts: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(1, num_experts))
    x, gate_up, down = (
        random(1, rows, 20),
        random(2, num_experts + 1, 28, 20),
        random(3, num_experts + 1, 20, 14),
    )
    ids, weights = decoder.choose_by_softmax(random(4, rows, num_experts), chosen, True)
    args = (x, gate_up, down, ids, weights, 1.5)
    if rows:
        assert_near(get_triton_op("mix_experts")(*args), reference.mix_experts(*args))
    biases = random(5, num_experts + 1, 28), random(6, num_experts + 1, 20)
    experts = GatedExperts(
        StoredStack.plain(gate_up), StoredStack.plain(down), decoder.silu_and_mul, *biases
    )

    def run_expert(part: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = decoder.silu_and_mul(part @ gate_up[expert].t() + biases[0][expert])
        return hidden @ down[expert].t() + biases[1][expert]

    if rows:
        expected = decoder.run_experts(x, ids, weights, run_expert)
        assert_near(get_triton_op("run_experts")(x, ids, weights, run_expert, experts), expected)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = random(1, 150, 96), random(2, 70, 96)
    whole = products.linear_in_order(x, weight)
    stacks = GatedExperts(
        StoredStack.plain(random(3, 5, 28, 96)),
        StoredStack.plain(random(4, 5, 96, 14)),
        decoder.silu_and_mul,
    )
    ids, weights = decoder.choose_by_softmax(random(5, 150, 5), 2, True)
    mixed = mix_gated_experts(x, ids, weights, stacks)
    grouped = products.grouped_linear_in_order(x.view(150, 3, 32), random(6, 3, 9, 32))
    assert_near(grouped, reference.grouped_linear(x.view(150, 3, 32), random(6, 3, 9, 32)))
    for rows in (slice(0, 1), slice(63, 66), slice(149, 150), slice(7, 90)):
        assert torch.equal(products.linear_in_order(x[rows], weight), whole[rows])
        alone = mix_gated_experts(x[rows], ids[rows], weights[rows], stacks)
        assert torch.equal(alone, mixed[rows])
        part = products.grouped_linear_in_order(x[rows].view(-1, 3, 32), random(6, 3, 9, 32))
        assert torch.equal(part, grouped[rows])
