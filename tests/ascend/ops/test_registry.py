"""Every op the model asks for, against the core's reference, over random shapes and types."""

import pytest
import torch

from vllm.exceptions import ConfigError
from vllm.v1.attention.ops import reference
from vllm.v1.attention.ops.registry import REFERENCE_OPS
from vllm_ascend.ops.pages import A2_A3_PAGES
from vllm_ascend.ops.registry import ASCEND_OPS, get_ascend_op
from vllm_ascend.ops.schemas import NPU_OPS

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


@pytest.fixture(params=range(3))
def rand(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


def randn(rand: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=rand).to(dtype)


def draw(rand: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=rand))


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == expected.dtype
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


def test_the_table_has_exactly_the_names_of_the_core() -> None:
    assert set(ASCEND_OPS) == set(REFERENCE_OPS)


def test_the_table_names_declared_calls_only() -> None:
    declared = {op.name for op in NPU_OPS}
    assert {call for op in ASCEND_OPS.values() for call in op.npu_calls} <= declared


def test_aten_ops_are_the_references_and_say_why() -> None:
    for name, op in ASCEND_OPS.items():
        assert op.note
        if not op.npu_calls and name not in A2_A3_PAGES.by_name():
            assert op.run is REFERENCE_OPS[name]


def test_unknown_op() -> None:
    with pytest.raises(ConfigError, match=r"'softmax'.*known: attend"):
        get_ascend_op("softmax")


def test_a5_only_ops_fall_back() -> None:
    assert get_ascend_op("hc_expand") is reference.hc_expand
    assert get_ascend_op("hc_expand", is_a5=True) is ASCEND_OPS["hc_expand"].run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["none", "one", "per head"])
def test_rms_norm(rand: torch.Generator, dtype: torch.dtype, weights: str) -> None:
    width = draw(rand, 1, 70)
    x = randn(rand, draw(rand, 0, 5), draw(rand, 1, 4), width, dtype=dtype)
    shapes = {"one": (width,), "per head": (x.shape[1], width)}
    weight = None if weights == "none" else randn(rand, *shapes[weights], dtype=dtype)
    ours = get_ascend_op("rms_norm")(x, weight, 1e-3)
    assert_same(ours, reference.rms_norm(x, weight, 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [None, 1, 3])
def test_rotate(rand: torch.Generator, dtype: torch.dtype, num_heads: int | None) -> None:
    num_rows, num_pairs = draw(rand, 0, 6), draw(rand, 1, 9)
    heads = () if num_heads is None else (num_heads,)
    x = randn(rand, num_rows, *heads, 2 * (num_pairs + draw(rand, 0, 3)), dtype=dtype)
    angles = randn(rand, num_rows, *(1 for _ in heads), num_pairs)
    turns = torch.polar(torch.ones_like(angles), angles)
    expected = reference.rotate_(x.clone(), turns)
    ours = get_ascend_op("rotate_")(x, turns)
    assert ours is x
    assert_same(ours, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("num_streams", [2, 4, 6])
def test_hc_expand(rand: torch.Generator, dtype: torch.dtype, num_streams: int) -> None:
    num_tokens, width = draw(rand, 1, 6), draw(rand, 1, 30)
    output = randn(rand, num_tokens, width, dtype=dtype)
    streams = randn(rand, num_tokens, num_streams, width, dtype=dtype)
    post = randn(rand, num_tokens, num_streams)
    mix = randn(rand, num_tokens, num_streams, num_streams)
    ours = get_ascend_op("hc_expand", is_a5=True)(output, streams, post, mix)
    expected = reference.hc_expand(output, streams, post, mix)
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mix_experts(rand: torch.Generator, dtype: torch.dtype) -> None:
    num_experts, inner, width = draw(rand, 3, 9), draw(rand, 1, 20), draw(rand, 1, 20)
    num_tokens, num_chosen = draw(rand, 0, 12), draw(rand, 1, 4)
    x = randn(rand, num_tokens, width, dtype=dtype)
    gate_up = randn(rand, num_experts + 1, 2 * inner, width, dtype=dtype) / width**0.5
    down = randn(rand, num_experts + 1, width, inner, dtype=dtype) / inner**0.5
    ids = torch.rand(num_tokens, num_experts, generator=rand).topk(num_chosen).indices
    weights = torch.rand(num_tokens, num_chosen, generator=rand)
    # A limit that clamps about half of the values.
    arguments = (x, gate_up, down, ids, weights, 0.5)
    ours = get_ascend_op("mix_experts")(*arguments)
    expected = reference.mix_experts(*arguments) if num_tokens else torch.empty_like(x)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (5e-2, 5e-2)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)
