"""Paged rows: floats as the core's reference, quantised ones as their formats round."""

import pytest
import torch

from tests.ascend.rounding import round_index_key, round_key
from vllm.exceptions import ConfigError
from vllm.v1.attention.ops import reference
from vllm_ascend.ops.pages import A2_A3_PAGES, make_a5_pages
from vllm_ascend.ops.row_formats import E4M3, Int8Rows


def make_cache(dtype: torch.dtype, width: int, padding: int) -> torch.Tensor:
    """Pages [6, 4, width] of a pool whose blocks are ``padding`` values longer."""
    stride = 4 * width + padding
    pool = torch.zeros(6 * stride, dtype=dtype)
    return pool.as_strided((6, 4, width), (stride, width, 1))


def draw_addresses(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.randperm(24, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
    return flat // 4, flat % 4


@pytest.mark.parametrize("num_rows", [0, 1, 7, 24])
@pytest.mark.parametrize("padding", [0, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_rows_are_the_references(num_rows: int, padding: int, dtype: torch.dtype) -> None:
    blocks, rows = draw_addresses(num_rows)
    values = torch.randn(num_rows, 8)
    ours, expected = make_cache(dtype, 8, padding), make_cache(dtype, 8, padding)
    A2_A3_PAGES.write_rows(ours, blocks, rows, values)
    reference.write_rows(expected, blocks, rows, values)
    assert torch.equal(ours, expected)
    read = A2_A3_PAGES.read_rows(ours, blocks, rows, torch.float32)
    assert torch.equal(read, values.to(dtype).float())


@pytest.mark.parametrize("padding", [0, 2, 10])
def test_int8_rows_are_within_half_a_step(padding: int) -> None:
    blocks, rows = draw_addresses(9)
    values = torch.randn(9, 128, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-4, 3, 9).unsqueeze(1)
    cache = make_cache(torch.int8, 130, padding)
    A2_A3_PAGES.write_rows(cache, blocks, rows, values)
    read = A2_A3_PAGES.read_rows(cache, blocks, rows, torch.float32)
    # Half a step, and half a unit of the scale's 11 significant bits (or of the smallest fp16)
    # times 127.
    largest = values.abs().amax(-1, keepdim=True)
    bound = largest / 127 / 2 * (1 + 2**-10) + 127 * torch.maximum(
        largest / 127 * 2**-11, torch.tensor(2.0**-25)
    )
    assert ((read - values).abs() <= bound).all()
    assert A2_A3_PAGES.read_rows(cache, blocks, rows, torch.bfloat16).dtype == torch.bfloat16


def test_a_row_is_130_bytes_values_first() -> None:
    row = Int8Rows().encode(torch.linspace(-254, 254, 128).unsqueeze(0))
    assert row.shape == (1, 130)
    assert row[0, 0] == -127
    assert row[0, 127] == 127
    assert row[0, 128:].view(torch.float16) == 2.0


@pytest.mark.parametrize("value", [0.0, 1e-8])
def test_rows_too_small_for_a_scale_read_back_as_zero(value: float) -> None:
    rows = Int8Rows().encode(torch.full((2, 128), value))
    assert torch.equal(Int8Rows().decode(rows, torch.float32), torch.zeros(2, 128))


def test_rows_beyond_the_scale_saturate() -> None:
    rows = Int8Rows().encode(torch.tensor([[1e12, -1e12]]))
    read = Int8Rows().decode(rows, torch.float32)
    assert read.tolist() == [[127 * 65504.0, -127 * 65504.0]]


def test_reading_many_at_once_keeps_the_addresses_shape() -> None:
    cache = make_cache(torch.int8, 130, 0)
    blocks, rows = (part.view(2, 3) for part in draw_addresses(6))
    assert A2_A3_PAGES.read_rows(cache, blocks, rows, torch.float32).shape == (2, 3, 128)


@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("width", [64, 32], ids=["keys", "index keys"])
@pytest.mark.parametrize("padding", [0, 5])
def test_a5_rows_are_as_their_format_rounds(num_rows: int, width: int, padding: int) -> None:
    a5 = make_a5_pages(head_dim=64, rope_dim=16, index_head_dim=32)
    blocks, rows = draw_addresses(num_rows)
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(2))
    cache = make_cache(torch.int8, {64: 96, 32: 36}[width], padding).view(E4M3)
    untouched = cache.view(torch.int8).clone()
    a5.write_rows(cache, blocks, rows, values)
    expected = round_key(values, 16) if width == 64 else round_index_key(values)
    assert torch.equal(a5.read_rows(cache, blocks, rows, torch.float32), expected.float())
    assert torch.equal(a5.round_rows(cache, values), expected.float())
    # Only the addressed rows were written.
    changed = (cache.view(torch.int8) != untouched).any(-1).nonzero().tolist()
    assert sorted(changed) == sorted(
        [b, r] for b, r in zip(blocks.tolist(), rows.tolist(), strict=True)
    )


def test_float_rows_on_an_a5_are_the_references() -> None:
    """Compressor rows are fp32 everywhere."""
    a5 = make_a5_pages(head_dim=64, rope_dim=16, index_head_dim=32)
    blocks, rows = draw_addresses(3)
    values = torch.randn(3, 96)
    cache = make_cache(torch.float32, 96, 0)
    a5.write_rows(cache, blocks, rows, values)
    assert torch.equal(a5.read_rows(cache, blocks, rows, torch.float32), values)
    assert a5.round_rows(cache, values) is values


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="both have 36 bytes"):
        make_a5_pages(head_dim=28, rope_dim=4, index_head_dim=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_writing_and_reading(dtype: torch.dtype) -> None:
    values = torch.randn(4, 8)
    blocks, rows = draw_addresses(4)
    cache = make_cache(dtype, 8, 0)
    A2_A3_PAGES.write_rows(cache, blocks, rows, values)
    read = A2_A3_PAGES.read_rows(cache, blocks, rows, torch.float32)
    assert torch.equal(A2_A3_PAGES.round_rows(cache, values), read)
