"""The decoders equal a decode that is spelled out, bit for bit."""

import math

import pytest
import torch

from tests.model_executor.layers.quantization.plain_decode import plain_fp4, plain_fp8
from vllm.model_executor.layers.quantization import decode
from vllm.model_executor.layers.quantization.decode import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    decode_fp4_groups,
    decode_fp8_blocks,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def random_bytes(*shape: int, high: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)


def random_scales(kind: str, *shape: int) -> torch.Tensor:
    if kind == "e8m0":
        return 60 + random_bytes(*shape, high=130, seed=1)
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2)) * 3 - 1


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both hold the same values; zero has one sign here."""
    return torch.equal((a + 0.0).view(torch.int32), (b + 0.0).view(torch.int32))


def test_every_e8m0_byte_is_a_power_of_two_and_never_the_number() -> None:
    values = decode_e8m0(ALL_BYTES)
    assert [math.log2(v) for v in values[:255].tolist()] == [b - 127 for b in range(255)]
    assert values[120] == 2.0**-7
    assert values[255].isnan()


def test_every_e4m3_code() -> None:
    ones = torch.full((1, 1), 127, dtype=torch.uint8)
    expected = plain_fp8(ALL_BYTES.view(1, 256), ones, (1, 256))
    assert decode_e4m3(ALL_BYTES).isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    finite = expected.isfinite()[0]
    assert same_bits(decode_e4m3(ALL_BYTES)[finite], expected[0][finite])


def test_every_pair_of_e2m1_codes_low_nibble_first() -> None:
    ones = torch.full((256, 1), 127, dtype=torch.uint8)
    expected = plain_fp4(ALL_BYTES.view(256, 1), ones, 2)
    assert same_bits(decode_e2m1(ALL_BYTES.view(256, 1)), expected)
    assert decode_e2m1(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [0.5, 1.0]


def test_minus_zero_is_zero() -> None:
    zeros = decode_e2m1(torch.tensor([0x88], dtype=torch.uint8))
    assert zeros.view(torch.int32).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["e8m0", "fp32"])
@pytest.mark.parametrize(("columns", "group"), [(64, 32), (64, 16), (256, 128), (48, 32), (24, 32)])
def test_fp4_groups(kind: str, columns: int, group: int) -> None:
    codes = random_bytes(5, columns // 2)
    scales = random_scales(kind, 5, -(-columns // group))
    assert same_bits(decode_fp4_groups(codes, scales, group), plain_fp4(codes, scales, group))


@pytest.mark.parametrize("kind", ["e8m0", "fp32"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((8, 8), (4, 4)),
        ((10, 7), (4, 4)),
        ((3, 5), (128, 128)),
        ((6, 8), (1, 8)),
        ((9, 9), (2, 16)),
    ],
)
def test_fp8_blocks(kind: str, shape: tuple[int, int], block: tuple[int, int]) -> None:
    codes = random_bytes(*shape, high=0x7F)
    codes[::2] += 0x80
    scales = random_scales(kind, -(-shape[0] // block[0]), -(-shape[1] // block[1]))
    expected = plain_fp8(codes, scales, block)
    assert same_bits(decode_fp8_blocks(codes, scales, block), expected)
    for first in range(shape[0]):
        for stop in range(first + 1, shape[0] + 1):
            part = decode_fp8_blocks(codes[first:stop], scales, block, first)
            assert same_bits(part, expected[first:stop])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("is_inference", [False, True])
def test_threads_change_nothing(
    num_threads: int, is_inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_MIN_CODES_PER_THREAD", 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    codes, scales = random_bytes(7, 32, high=0x7F), random_scales("e8m0", 7, 2)
    with torch.inference_mode(is_inference):
        out = torch.empty(7, 64)
        assert decode_fp4_groups(codes, scales, 32, out).data_ptr() == out.data_ptr()
        assert same_bits(out, plain_fp4(codes, scales, 32))
        blocks = decode_fp8_blocks(codes, scales, (1, 16))
        assert same_bits(blocks, plain_fp8(codes, scales, (1, 16)))


def test_extreme_scales_stay_exact() -> None:
    codes = torch.tensor([[0x01, 0x7E]], dtype=torch.uint8)
    for byte in (0, 1, 118, 240):
        scales = torch.tensor([[byte]], dtype=torch.uint8)
        assert same_bits(decode_fp8_blocks(codes, scales, (1, 2)), plain_fp8(codes, scales, (1, 2)))
