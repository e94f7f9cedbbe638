"""Where layers of full attention keep their rows, the others' window rows can be computed again.

As for DeepSeek-V4: windows of L layers begin with wrong rows, and W - 1 tokens later per layer with
right ones, as long as keys below b are read as they are stored, and not as they are computed.
Layers that share keys and values read the rows of layers below, so they make the way no longer.
"""

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    PARITY_CONFIGS,
    build_hf_model,
    gemma4_small,
    run_reference,
)
from tests.model_executor.models.harness import PagedHarness, Request, is_dense
from tests.model_executor.models.hf_reference import random_tokens
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.native.loader import load_library
from vllm.v1.core.geometry import num_rebuild_tokens

pytestmark = pytest.mark.slow

LENGTH, BOUNDARY = 420, 400
# In the mixed families of the parity tests: windows that are not full attention.
# Layers that share keys and values keep none: four of seven windows count.
SPANS = {"gemma3": 4 * 47 + 1, "gemma4-small": 4 * 15 + 1, "gpt-oss": 2 * 31 + 1}


@pytest.fixture(scope="module", params=list(SPANS))
def case(request: pytest.FixtureRequest) -> tuple[DecoderForCausalLM, int, torch.Tensor]:
    raw = PARITY_CONFIGS[request.param]
    reference = build_hf_model(raw, seed=7)
    run = run_reference(reference, random_tokens(LENGTH, 1))
    saved = {**reference.config.to_dict(), "architectures": [type(reference).__name__]}
    return build_model(saved, dict(reference.state_dict())), SPANS[request.param], run.logits


def lose_windows(
    harness: PagedHarness, request: Request, start: int, boundary: int = BOUNDARY
) -> None:
    """Computes up to the boundary, then forgets the windows and goes back to ``start``."""
    harness.step([(request, boundary)])
    harness.forget_windows(request)
    request.num_computed = request.read_from = start
    request.write_from = tuple(
        boundary if is_dense(group) else start for group in harness.layout.groups
    )


def run_from(
    model: DecoderForCausalLM, start: int, sizes: list[int], native: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns the logits behind the boundary, and the dense pages before and after."""
    harness = make_harness(model, native=native)
    request = harness.add(random_tokens(LENGTH, 1))
    lose_windows(harness, request, start)
    dense = [
        name
        for name, group in harness.layout.group_of.items()
        if is_dense(harness.layout.groups[group])
    ]
    before = [harness.kv_caches[name].clone() for name in dense]
    for size in sizes:
        harness.step([(request, size)])
    after = [harness.kv_caches[name].clone() for name in dense]
    assert request.num_computed == BOUNDARY
    request.write_from, request.read_from = (), 0
    return harness.step([(request, LENGTH - BOUNDARY)])[0], before, after


@pytest.mark.parametrize("first", [0, 5, 50], ids=["whole", "decode", "chunks"])
def test_windows_are_exact_and_dense_rows_are_left_alone(
    case: tuple[DecoderForCausalLM, int, torch.Tensor], first: int
) -> None:
    model, span, expected = case
    sizes = [first, span - first] if first else [span]
    logits, before, after = run_from(model, BOUNDARY - span, sizes)
    torch.testing.assert_close(logits, expected[BOUNDARY:], atol=1e-3, rtol=0)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_a_shorter_run_is_not_exact(case: tuple[DecoderForCausalLM, int, torch.Tensor]) -> None:
    model, span, expected = case
    logits, _, _ = run_from(model, BOUNDARY - span // 2, [span // 2])
    assert float((logits - expected[BOUNDARY:]).abs().max()) > 1e-2


@pytest.mark.skipif(load_library() is None, reason="make native builds the kernels")
@pytest.mark.parametrize("first", [0, 5], ids=["whole", "decode"])
def test_the_native_kernels_do_the_same(
    case: tuple[DecoderForCausalLM, int, torch.Tensor], first: int
) -> None:
    model, span, expected = case
    sizes = [first, span - first] if first else [span]
    logits, before, after = run_from(model, BOUNDARY - span, sizes, native=1)
    torch.testing.assert_close(logits, expected[BOUNDARY:], atol=1e-3, rtol=0)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


@pytest.mark.skipif(load_library() is None, reason="make native builds the kernels")
@pytest.mark.parametrize("num_shared", [0, 3])
def test_every_boundary_of_shared_layers_and_hardly_a_token_fewer(num_shared: int) -> None:
    raw = gemma4_small(sliding_window=5, num_kv_shared_layers=num_shared)
    model = build_model(raw, build_hf_model(raw, seed=7).state_dict())
    config = model.config
    windows = [layer.window for layer in config.layers if layer.window and layer.kv_owner is None]
    span = num_rebuild_tokens(windows, tail=4)
    # Six windows of eight layers, of which those that share keep no rows.
    assert span == (6 - (num_shared * 2 + 1) // 3) * 4 + 1
    token_ids = random_tokens(span + 50, 2)
    whole = make_harness(model, native=1).run(token_ids, [len(token_ids)])
    too_short = 0
    # The reach is L * (W - 1); the formula has a token to spare.
    for boundary in range(span, span + 18):
        for length in (span, span - 2):
            harness = make_harness(model, native=1)
            request = harness.add(token_ids[: boundary + 6])
            lose_windows(harness, request, boundary - length, boundary)
            harness.step([(request, length)])
            request.write_from, request.read_from = (), 0
            (logits,) = harness.step([(request, 6)])
            is_exact = torch.equal(logits, whole[boundary : boundary + 6])
            assert is_exact or length < span, boundary
            too_short += length < span and not is_exact
    assert too_short == 18
