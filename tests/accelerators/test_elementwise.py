"""Norms, turns, gates, hyper-connections and page moves against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerators.comparing import assert_near
from vllm.platforms import block_ops
from vllm.v1.attention.ops import reference
from vllm.v1.attention.ops.registry import REFERENCE_OPS, get_reference_op
from vllm.v1.attention.ops.triton import launch
from vllm.v1.attention.ops.triton.pages import copy_blocks, write_slots
from vllm.v1.attention.ops.triton.registry import TRITON_OPS, get_triton_op

pytestmark = pytest.mark.slow

few = settings(max_examples=8)
sizes = st.integers(0, 70)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_name_has_an_op_and_a_reason_where_it_is_torch() -> None:
    assert set(TRITON_OPS) == set(REFERENCE_OPS)
    for name, op in TRITON_OPS.items():
        assert (op.run is REFERENCE_OPS[name]) <= bool(op.note), name


def test_kernels_are_interpreted_here() -> None:
    assert launch.IS_INTERPRETED


@few
@given(sizes, st.integers(1, 5), st.integers(1, 40), dtypes, st.booleans())
def test_norms(rows: int, heads: int, width: int, dtype: torch.dtype, has_offset: bool) -> None:
    # Heads of a wider row, as a projection leaves them.
    x = random(1, rows, heads * width + 3, dtype=dtype)[:, : heads * width].view(rows, heads, width)
    name = "rms_norm_offset" if has_offset else "rms_norm"
    op, expected = get_triton_op(name), get_reference_op(name)
    for weight in (random(2, width, dtype=dtype), random(3, heads, width, dtype=dtype)):
        assert_near(op(x, weight, 1e-6), expected(x, weight, 1e-6))
    if not has_offset:
        assert_near(op(x, None, 1e-6), expected(x, None, 1e-6))
        assert_near(op(x[:, 0], None, 1e-6), expected(x[:, 0], None, 1e-6))


@few
@given(sizes, st.integers(1, 5), st.integers(1, 20), dtypes)
def test_turns(rows: int, heads: int, half: int, dtype: torch.dtype) -> None:
    x = random(1, rows, heads * 2 * half + 4, dtype=dtype)[:, : heads * 2 * half]
    x = x.view(rows, heads, 2 * half)
    cos, sin = random(2, rows, 1, 2 * half, dtype=dtype), random(3, rows, 1, 2 * half, dtype=dtype)
    args = (x, cos, sin)
    assert_near(get_triton_op("rotate_halves")(*args), get_reference_op("rotate_halves")(*args))
    pairs = (half + 1) // 2
    turns = torch.polar(torch.ones(rows, 1, pairs), random(4, rows, 1, pairs))
    rotate_ = get_triton_op("rotate_")
    assert_near(rotate_(x.clone(), turns), reference.rotate_(x.clone(), turns))
    row, turn = x[:, 0].clone(), turns[:, 0].contiguous()
    assert_near(rotate_(row.clone(), turn), reference.rotate_(row.clone(), turn))


@few
@given(sizes, st.integers(1, 60), dtypes)
def test_gates_and_caps(rows: int, width: int, dtype: torch.dtype) -> None:
    x = 4 * random(1, rows, 2 * width, dtype=dtype)
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        assert_near(get_triton_op(name)(x), get_reference_op(name)(x))
    name, args = "clamped_glu_and_mul", (1.702, 2.0)
    assert_near(get_triton_op(name)(x, *args), get_reference_op(name)(x, *args))
    # Far out a gate must not become NaN.
    assert get_triton_op("silu_and_mul")(200 * x).isfinite().all()
    logits = random(2, rows, width)
    expected = get_reference_op("soft_cap_")(logits.clone(), 2.0)
    assert_near(get_triton_op("soft_cap_")(logits.clone(), 2.0), expected)
    columns = random(2, rows, 2 * width)[:, ::2]
    expected = get_reference_op("soft_cap_")(columns.clone(), 2.0)
    assert_near(get_triton_op("soft_cap_")(columns, 2.0), expected)


@few
@given(sizes, st.sampled_from([1, 2, 4, 6]), st.integers(1, 50), dtypes)
def test_hyper_connections(rows: int, streams: int, width: int, dtype: torch.dtype) -> None:
    x = random(1, rows, streams, width, dtype=dtype)
    outputs = (2 + streams) * streams
    fn, base, scale = random(2, outputs, streams * width), random(3, outputs), random(4, outputs)
    args = (x, fn, scale, base, 1e-6)
    projected = reference.hc_project(*args)
    assert_near(get_triton_op("hc_project")(*args), projected)
    logits = projected[:, 2 * streams :].view(-1, streams, streams)
    sums = reference.sinkhorn_sums(streams, 1e-6)
    mix = reference.sinkhorn(logits, 5, 1e-6, *sums)
    assert_near(get_triton_op("sinkhorn")(logits, 5, 1e-6, *sums), mix)
    weights = random(5, rows, 2 * streams)[:, :streams]
    collapsed = reference.hc_collapse(x, weights)
    assert_near(get_triton_op("hc_collapse")(x, weights), collapsed)
    expanded = reference.hc_expand(collapsed, x, weights, mix)
    assert_near(get_triton_op("hc_expand")(collapsed, x, weights, mix), expanded)


def test_a_long_projection_is_split() -> None:
    x, fn = random(1, 3, 4, 1100), random(2, 24, 4400)
    args = (x, fn, random(3, 1), random(4, 24), 1e-6)
    assert_near(get_triton_op("hc_project")(*args), reference.hc_project(*args))


def make_pages(blocks: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages that are NaN, in a pool whose rows hold other layers' too."""
    stride = rows * width + 5
    return torch.full((blocks * stride,), torch.nan, dtype=dtype).as_strided(
        (blocks, rows, width), (stride, width, 1)
    )


@few
@given(sizes, st.integers(1, 20), st.integers(1, 70), dtypes)
def test_pages(num_rows: int, page_rows: int, width: int, dtype: torch.dtype) -> None:
    cache = make_pages(81, page_rows, width, dtype)
    order = torch.randperm(80 * page_rows, generator=torch.Generator().manual_seed(1))
    places = page_rows + order[:num_rows]
    blocks, rows = places // page_rows, places % page_rows
    values = random(2, len(places), width + 1)[:, :width]
    get_triton_op("write_rows")(cache, blocks, rows, values)
    assert_near(cache[blocks, rows], values.to(dtype))
    assert int((~cache.isnan()).sum()) == values.numel()
    read = get_triton_op("read_rows")(cache, blocks, rows, torch.float32)
    assert torch.equal(read, cache[blocks, rows].float())
    # By slot mapping, every third row left out.
    kept = places.int()
    kept[::3] = -1
    other = make_pages(81, page_rows, width, dtype)
    write_slots(other, kept, values)
    is_kept = kept >= 0
    assert torch.equal(other[blocks, rows][is_kept], cache[blocks, rows][is_kept])
    assert int((~other.isnan()).sum()) == int(is_kept.sum()) * width


def test_rows_of_the_null_block_are_zeros_and_stay_so() -> None:
    """A recorded step has rows of nobody: they go to block 0, several to one place."""
    cache = torch.zeros(4, 3, 5)
    blocks, rows = torch.tensor([0, 2, 0, 3]), torch.tensor([1, 1, 1, 0])
    values = random(2, 4, 5)
    get_triton_op("write_rows")(cache, blocks, rows, values)
    assert not cache[0].any()
    assert torch.equal(cache[2, 1], values[1])
    assert torch.equal(cache[3, 0], values[3])
    cache[0] = torch.nan
    read = get_triton_op("read_rows")(cache, blocks, rows, torch.float32)
    assert torch.equal(read, values * (blocks > 0)[:, None])


@pytest.mark.parametrize("stride", [64, 37])
def test_blocks_are_copied_all_at_once(stride: int) -> None:
    pools = [torch.randint(0, 255, (9, stride), dtype=torch.uint8) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    chain_and_cycle = [(1, 2), (2, 3), (4, 5), (5, 4), (8, 6)]
    block_ops.copy_blocks(expected, chain_and_cycle)
    copy_blocks(pools, chain_and_cycle)
    for pool, other in zip(pools, expected, strict=True):
        assert torch.equal(pool, other)
    copy_blocks(pools, [])
    with pytest.raises(AssertionError, match="null block"):
        copy_blocks(pools, [(0, 1)])
