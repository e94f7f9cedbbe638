"""bf16 models: products round their inputs, and all builds have the matrix unit's order of sums."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.harness import PagedHarness
from tests.native.test_deepseek_v4 import make_model
from tests.native.test_library import builds, make_context
from tests.native.test_random_shapes import FAMILIES, draw_decoder, find_tensors
from vllm.model_executor.layers.quantization.bf16_panels import Bf16Panels, PackedWeights
from vllm.native.decoder import NativeDecoder
from vllm.native.deepseek_v4 import NativeDeepseekV4
from vllm.native.models import make_native_model
from vllm.native.tensors import TensorBinder
from vllm.v1.attention.layout import CacheLayout

BLOCK = 32
FUSED = [build for build in builds() if build != "portable"]


def multiply(build: str, x: torch.Tensor, weight: torch.Tensor, threads: int = 1) -> torch.Tensor:
    binder = TensorBinder(CacheLayout((), {}), {}, PackedWeights(releases=False))
    output = torch.empty(len(x), len(weight))
    make_context(threads, build).matmul(binder.matrix(weight), x, output)
    return output


def multiply_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The order of sums, spelled out for normal numbers.

    A product of two bf16 numbers is exact in fp64; the sum with a third is rounded there and then
    to fp32, which differs from one rounding in some 1 of 2^29 cases only.
    """
    wide_x, wide_w = x.bfloat16().double().numpy(), weight.double().numpy()
    total = np.zeros((len(x), len(weight)), np.float32)
    for begin in range(0, weight.shape[1], BLOCK):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(begin, min(begin + BLOCK, weight.shape[1])):
            product = wide_x[:, k, None] * wide_w[None, :, k]
            chains[k % 2] = (chains[k % 2] + product).astype(np.float32)
        total = total + (chains[0] + chains[1])
    return torch.from_numpy(total)


@pytest.mark.parametrize("build", FUSED)
def test_the_order_of_sums(build: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for rows, width in ((70, 100), (130, 64), (3, 1)):
        weight = torch.randn(rows, width, generator=generator).bfloat16()
        x = torch.randn(19, width, generator=generator)
        expected = multiply_in_order(x, weight)
        for count in (1, 2, 3, 7, 16, 19):
            got = multiply(build, x[:count], weight)
            torch.testing.assert_close(got, expected[:count], atol=0, rtol=1e-6)
            assert (got != expected[:count]).sum() <= 2, "double rounding alone explains few"


@pytest.mark.parametrize("build", builds())
@settings(deadline=None, max_examples=25)
@given(
    num_inputs=st.sampled_from([1, 2, 3, 5, 6, 7, 9, 13, 16, 17, 33, 97, 530]),
    rows=st.integers(1, 300),
    width=st.sampled_from([1, 8, 31, 32, 64, 100, 515]),
    threads=st.integers(1, 3),
)
def test_a_row_has_the_same_bits_in_any_company(
    build: str, num_inputs: int, rows: int, width: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, width, generator=generator).bfloat16()
    x = torch.randn(num_inputs, width, generator=generator)
    together = multiply(build, x, weight, threads)
    for row in {0, num_inputs // 2, num_inputs - 1}:
        assert torch.equal(multiply(build, x[row : row + 1], weight)[0], together[row])
    if build != "portable":
        assert all(torch.equal(multiply(other, x, weight), together) for other in FUSED)
    exact = x.bfloat16().double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T
    assert ((together - exact).abs() <= 1e-5 * bound).all()


@pytest.mark.parametrize("build", FUSED)
def test_numbers_that_are_not_normal(build: str) -> None:
    """Tiny ones count as zero: inputs, weights, products and sums. Infinity and NaN pass on."""
    tiny, least = 1e-39, 2.0**-126
    weight = torch.tensor([[tiny, 1.0], [1.0, 1.0], [least, 1.0], [0.0, -0.0]]).bfloat16()
    x = torch.tensor([[1.0, 0.0], [tiny, 0.0], [0.5, 0.0], [float("inf"), 0.0], [0.0, -1.0]])
    x = x.repeat(4, 1)
    got = multiply(build, x, weight)
    for row in range(len(x)):
        alone = multiply(build, x[row : row + 1], weight)[0]
        assert torch.equal(alone.view(torch.int32), got[row].view(torch.int32))
    expected = torch.tensor([[0.0, 1.0, least, 0.0], [0.0] * 4, [0.0, 0.5, 0.0, 0.0]])
    assert torch.equal(got[:3], expected)
    infinite = got[3].tolist()
    assert infinite[1:3] == [float("inf")] * 2
    assert np.isnan([infinite[0], infinite[3]]).all(), "infinity times zero"


def test_inputs_are_rounded_to_the_nearest_even() -> None:
    ulp = 2.0**-7
    x = torch.tensor([[1 + ulp / 2], [1 + 3 * ulp / 2], [1 + ulp / 2 + 2**-20], [-1 - ulp / 2]])
    one = torch.ones(1, 1).bfloat16()
    for build in builds():
        assert multiply(build, x, one).flatten().tolist() == [1, 1 + 2 * ulp, 1 + ulp, -1]


def test_rows_are_read_back() -> None:
    weight = torch.randn(150, 45).bfloat16()
    panels = Bf16Panels(weight)
    for start, stop in ((0, 150), (60, 130), (149, 150)):
        rows = torch.empty(stop - start, 45)
        panels.write_rows(start, rows)
        assert torch.equal(rows, weight[start:stop].float())


def make_bf16(name: str) -> tuple[Any, Any, Any]:
    """Returns a small model, its harness and what runs it natively."""
    if name == "deepseek_v4":
        return (
            make_model(torch.bfloat16, num_nextn_predict_layers=1),
            PagedHarness,
            NativeDeepseekV4,
        )
    raw = draw_decoder(name, random.Random(f"bf16 {name}"))
    return build_model(raw, find_tensors(raw, 5), torch.bfloat16), make_harness, NativeDecoder


@pytest.mark.parametrize("name", [*FAMILIES, "deepseek_v4"])
def test_a_model_has_the_same_bits_in_chunks_and_builds(name: str) -> None:
    model, make, run = make_bf16(name)
    token_ids = [0, *(i * 7 % 16 for i in range(60)), 5]
    logits = {}
    for build in builds():
        harness = make(model, native=1, cache_dtype=torch.bfloat16)
        own = run(model, harness.layout, harness.kv_caches, make_context(2, build))
        harness.steps = replace(harness.steps, model=own)
        logits[build] = harness.run(token_ids, [62])
        assert torch.equal(harness.run(token_ids, [1, 40, 1, 2, 9, 9]), logits[build]), build
    assert all(torch.equal(logits[build], logits[FUSED[0]]) for build in FUSED)
    by_torch = make(model, cache_dtype=torch.bfloat16).run(token_ids, [62]).float()
    both = torch.stack([logits["portable"].flatten(), by_torch.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.9


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "kimi_linear", "glm5_next", "deepseek_v4"])
def test_weights_that_are_given_back_are_read_from_their_panels(name: str) -> None:
    model, make, _ = make_bf16(name)
    token_ids = [0, *(i * 5 % 16 for i in range(30))]
    expected = make(model, native=1, cache_dtype=torch.bfloat16).run(token_ids, [31])
    harness = make(model, native=1, cache_dtype=torch.bfloat16)
    model.packed = None
    for _ in range(2):  # a model may be bound again
        steps = make_native_model(model, harness.layout, harness.kv_caches, 1, releases=True)
        assert steps is not None
        harness.steps = steps
        assert torch.equal(harness.run(token_ids, [31]), expected)
        held = sum(weight.untyped_storage().nbytes() for weight in model.parameters())
        assert held < sum(weight.nbytes for weight in model.parameters()) / 2
    assert torch.isfinite(model.embed(torch.tensor(token_ids))).all()
