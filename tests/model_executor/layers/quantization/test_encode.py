"""Encoders: the nearest code, ties to even, and scales that use the format's range."""

import pytest
import torch

from tests.model_executor.layers.quantization.plain_decode import (
    E2M1,
    e4m3_value,
    plain_fp4,
    plain_fp8,
)
from vllm.model_executor.layers.quantization.decode import decode_fp4_groups, decode_fp8_blocks
from vllm.model_executor.layers.quantization.encode import encode_fp4_groups, encode_fp8_blocks


def random_matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator).float())
    return torch.randn(shape, generator=generator) * spread


def test_e2m1_takes_the_nearest_and_ties_go_to_even_codes() -> None:
    # 6 fixes the scale at one; the rest are values and the midpoints between them.
    values = [6.0, 0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, -0.25, -0.3, -5.1]
    codes, scales = encode_fp4_groups(torch.tensor([values]), 32)
    assert scales.view(torch.uint8).item() == 127
    decoded = decode_fp4_groups(codes, scales.view(torch.uint8), 32)[0].tolist()
    assert decoded == [6.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.5, 0.5, 0.0, -0.5, -6.0]


@pytest.mark.parametrize(("columns", "group"), [(64, 32), (48, 32), (64, 16), (6, 128)])
def test_fp4_is_the_nearest_of_all_codes(columns: int, group: int) -> None:
    weight = random_matrix(7, columns)
    codes, scales = encode_fp4_groups(weight, group)
    assert codes.shape == (7, columns // 2)
    assert scales.shape == (7, -(-columns // group))
    decoded = plain_fp4(codes, scales.view(torch.uint8), group)
    factors = scales.float().repeat_interleave(group, 1)[:, :columns]
    grid = torch.tensor([*E2M1, *(-value for value in E2M1)])
    nearest = (weight.unsqueeze(2) - grid * factors.unsqueeze(2)).abs().amin(2)
    assert torch.equal((weight - decoded).abs(), nearest)
    assert (weight.abs() <= 6 * factors).all()
    peaks = (weight / factors).abs()
    assert peaks.unflatten(1, (-1, min(group, columns // scales.shape[1]))).amax(2).min() > 3


@pytest.mark.parametrize("float_scales", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((8, 12), (4, 4)), ((9, 7), (128, 128))])
def test_fp8_is_the_nearest_of_all_codes(
    shape: tuple[int, int], block: tuple[int, int], float_scales: bool
) -> None:
    weight = random_matrix(*shape)
    codes, scales = encode_fp8_blocks(weight, block, float_scales=float_scales)
    stored = scales if float_scales else scales.view(torch.uint8)
    decoded = plain_fp8(codes.view(torch.uint8), stored, block)
    factors = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    factors = factors[: shape[0], : shape[1]]
    grid = torch.tensor([e4m3_value(byte) for byte in range(256) if byte & 0x7F != 0x7F])
    nearest = (weight.unsqueeze(2) - grid * factors.unsqueeze(2)).abs().amin(2)
    torch.testing.assert_close((weight - decoded).abs(), nearest, rtol=0, atol=1e-6)


def test_what_the_format_holds_survives() -> None:
    codes = torch.randint(0, 256, (4, 32), dtype=torch.uint8)
    codes[:, 0] = 0x17  # a 6 in each group: the same scale is found again
    scales = torch.full((4, 2), 121, dtype=torch.uint8)
    codes[:, 16] = 0x17
    weight = decode_fp4_groups(codes, scales, 32)
    again, found = encode_fp4_groups(weight, 32)
    assert torch.equal(found.view(torch.uint8), scales)
    assert torch.equal(decode_fp4_groups(again, scales, 32), weight)


def test_zeros_stay_zeros() -> None:
    codes, scales = encode_fp8_blocks(torch.zeros(2, 4), (2, 2))
    assert not decode_fp8_blocks(codes.view(torch.uint8), scales.view(torch.uint8), (2, 2)).any()
    codes, scales = encode_fp4_groups(torch.zeros(2, 4), 32)
    assert not decode_fp4_groups(codes, scales.view(torch.uint8), 32).any()
