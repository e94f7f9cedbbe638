"""Decoders of grouped-query attention on the native kernels."""

import random
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    PARITY_CONFIGS,
    build_hf_model,
    gpt_oss,
    run_reference,
)
from tests.model_executor.models.decoder.test_clamped_experts import MXFP4, SIZES, quantise
from tests.model_executor.models.hf_reference import random_tokens
from vllm.exceptions import InvariantError
from vllm.model_executor.models.decoder.model import DecoderForCausalLM

TOLERANCE = 1e-3
# Where the default sequence has near-ties of a router.
SEEDS = {"qwen3-moe-step": 3, "gemma4-moe": 4}


def build(raw: dict[str, Any]) -> tuple[DecoderForCausalLM, Any]:
    reference = build_hf_model(raw, seed=7)
    return build_model(raw, reference.state_dict()), reference


def random_split(total: int, rng: random.Random) -> list[int]:
    chunks = []
    while total:
        chunks.append(min(total, rng.choice([1, 1, 2, 5, 8, 9, 64, 100])))
        total -= chunks[-1]
    return chunks


@pytest.mark.slow
@pytest.mark.parametrize("name", PARITY_CONFIGS)
def test_numbers_are_those_of_transformers(name: str) -> None:
    model, reference = build(PARITY_CONFIGS[name])
    token_ids = random_tokens(300, SEEDS.get(name, 1))
    expected = run_reference(reference, token_ids).logits
    rng = random.Random(5)
    for threads, chunks in ((1, [300]), (2, random_split(300, rng))):
        harness = make_harness(model, native=threads, packed=threads == 2)
        logits = harness.run(token_ids, chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        assert harness.steps.model is not model


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gemma3", "qwen3.5", "gemma4-small", "gemma4-moe", "gpt-oss", "qwen3-moe-step"]
)
def test_bits_do_not_depend_on_batch_chunks_or_threads(name: str) -> None:
    model, _ = build(PARITY_CONFIGS[name])
    rng = random.Random(11)
    sequences = [random_tokens(rng.randrange(40, 300), seed) for seed in range(6)]
    alone = [make_harness(model, native=1).run(ids, [len(ids)]) for ids in sequences]
    for threads in (1, 2):
        harness = make_harness(model, num_blocks=400, native=threads)
        requests = [harness.add(ids) for ids in sequences]
        together: list[list[torch.Tensor]] = [[] for _ in sequences]
        while any(request.num_left for request in requests):
            live = [i for i, request in enumerate(requests) if request.num_left]
            chosen = rng.sample(live, rng.randint(1, len(live)))
            work = [(requests[i], random_split(requests[i].num_left, rng)[0]) for i in chosen]
            for i, logits in zip(chosen, harness.step(work), strict=True):
                together[i].append(logits)
        for parts, expected in zip(together, alone, strict=True):
            assert torch.equal(torch.cat(parts), expected)


def test_mxfp4_experts_equal_their_decoded_twin() -> None:
    raw = gpt_oss(**SIZES)
    stored, decoded = quantise(build_hf_model(raw, seed=7).state_dict())
    quantised = build_model({**raw, **MXFP4}, stored)
    plain = build_model(raw, decoded)
    token_ids = random_tokens(60, 1)
    logits = [make_harness(model, native=1).run(token_ids, [60]) for model in (quantised, plain)]
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


def test_a_missing_row_is_an_invariant_error() -> None:
    model, _ = build(PARITY_CONFIGS["gemma3"])
    harness = make_harness(model, native=1)
    sequence = harness.add(random_tokens(40, 1))
    harness.step([(sequence, 39)])
    for blocks in sequence.blocks:
        blocks[0] = 0
    with pytest.raises(InvariantError, match=r"needs the row of position \d+ .* table stores none"):
        harness.step([(sequence, 1)])
