"""Quantised rows: the bytes where the layout says, and the values that plain rounding gives."""

import pytest
import torch

from tests.ascend.rounding import round_e4m3, round_index_key, round_int8_key, round_key
from vllm.exceptions import ConfigError
from vllm_ascend.ops.row_formats import E4M3, Fp8IndexRows, Fp8KeyRows, Int8Rows, RowFormat


def draw_rows(width: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, and one of zeros."""
    rand = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, width, generator=rand)
    rows *= torch.logspace(-6, 5, 40).unsqueeze(1)
    rows[7] = 0
    return rows


def test_plain_rounding_is_torchs_own() -> None:
    every_bit_pattern = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = every_bit_pattern[every_bit_pattern.isfinite()]
    assert torch.equal(round_e4m3(numbers).float(), numbers)
    ordered = numbers.sort().values
    between = ordered[:-1].lerp(ordered[1:], 0.5)
    assert torch.equal(round_e4m3(between).float(), between.to(E4M3).float())


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (64, 16), (256, 64), (128, 2)])
def test_a5_keys_mean_what_plain_rounding_gives(head_dim: int, rope_dim: int) -> None:
    row_format, values = Fp8KeyRows(head_dim, rope_dim), draw_rows(head_dim)
    rows = row_format.encode(values)
    assert rows.shape == (40, row_format.row_bytes)
    expected = round_key(values, rope_dim).float()
    assert torch.equal(row_format.decode(rows, torch.float32), expected)
    # Rounding again changes no value: a row can be copied through the model's type.
    again = row_format.encode(expected)
    assert torch.equal(row_format.decode(again, torch.float32), expected)


@pytest.mark.parametrize("width", [128, 32])
def test_index_keys_mean_what_plain_rounding_gives(width: int) -> None:
    values = draw_rows(width)
    for row_format, expected in (
        (Fp8IndexRows(), round_index_key(values).float()),
        (Int8Rows(), round_int8_key(values)),
    ):
        assert torch.equal(row_format.decode(row_format.encode(values), torch.float32), expected)


def test_an_a5_key_is_512_and_128_bytes() -> None:
    values = torch.zeros(1, 512)
    values[0, :448] = torch.arange(7).repeat_interleave(64).exp2() * 448
    values[0, 448:] = torch.arange(64)
    (row,) = Fp8KeyRows(512, 64).encode(values)
    assert row.shape == (640,)
    assert (row[:448].view(E4M3).float() == 448).all()
    assert (row[448:455].view(torch.uint8) == 127 + torch.arange(7)).all()
    assert not row[455:512].any()
    assert torch.equal(row[512:].view(torch.bfloat16).float(), torch.arange(64).float())


def test_a_scale_is_the_smallest_power_that_fits() -> None:
    """448 fits in a scale of one, the next number does not."""
    above = float(torch.nextafter(torch.tensor(448.0), torch.tensor(449.0)))
    for largest, exponent in ((448.0, 127), (above, 128), (224.0, 126), (2.0, 120), (1.75, 119)):
        row = Fp8KeyRows(128, 64).encode(torch.full((1, 128), largest))
        assert int(row[0, 64].view(torch.uint8)) == exponent, largest


def test_an_a5_index_key_is_132_bytes_values_first() -> None:
    (row,) = Fp8IndexRows().encode(torch.linspace(-896, 896, 128).unsqueeze(0))
    assert row.shape == (132,)
    assert row[:128].view(E4M3).float()[[0, 127]].tolist() == [-448.0, 448.0]
    assert row[128:].view(torch.float32) == 2.0


@pytest.mark.parametrize("row_format", [Fp8KeyRows(64, 16), Fp8IndexRows(), Int8Rows()])
def test_any_leading_axes_and_types(row_format: RowFormat) -> None:
    values = draw_rows(64)
    rows = row_format.encode(values.bfloat16())
    assert torch.equal(rows, row_format.encode(values.bfloat16().float()))
    read = row_format.decode(rows.view(5, 8, -1), torch.bfloat16)
    assert (read.shape, read.dtype) == ((5, 8, 64), torch.bfloat16)


def test_a_head_without_room_for_scales_is_refused() -> None:
    with pytest.raises(ConfigError, match="512 values with 4 rotary"):
        Fp8KeyRows(512, 4)
