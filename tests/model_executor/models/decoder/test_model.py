"""Parity of every family with transformers in fp32, whatever the chunking and the batch mix.

As for DeepSeek-V4: a near-tie of a router would spoil everything after it, so sequences are chosen
whose least margin (measured in the reference) exceeds 1e-5, which is asserted.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    PARITY_CONFIGS,
    ReferenceRun,
    build_hf_model,
    config_as_saved,
    run_reference,
)
from tests.model_executor.models.hf_reference import random_tokens
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.registry import resolve_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
MIN_MARGIN = 1e-5
LENGTH = 300
LONG_LENGTH = 1500

# Four sequences and a long one, where the defaults have near-ties.
SEEDS = {
    "qwen3-moe-step": (1, 3, 4, 5, 1000),
    "gemma4-small": (5, 6, 7, 8, 1000),
    "gemma4-moe": (2, 3, 4, 5, 1004),
    "gpt-oss": (1, 2, 3, 4, 1001),
    "gpt-oss-wide-window": (1, 2, 3, 4, 1001),
}


@dataclass
class Case:
    """One config: our model, and sequences with the reference's logits."""

    name: str
    model: DecoderForCausalLM
    saved: dict[str, object]
    sequences: list[list[int]]
    references: list[ReferenceRun]
    long_sequence: list[int]
    long_reference: ReferenceRun


@pytest.fixture(scope="module", params=list(PARITY_CONFIGS))
def case(request: pytest.FixtureRequest) -> Case:
    raw = PARITY_CONFIGS[request.param]
    reference = build_hf_model(raw, seed=7)
    seeds = SEEDS.get(request.param, (1, 2, 3, 4, 1000))
    sequences = [random_tokens(LENGTH, seed) for seed in seeds[:-1]]
    references = [run_reference(reference, token_ids) for token_ids in sequences]
    long_sequence = random_tokens(LONG_LENGTH, seeds[-1])
    return Case(
        request.param,
        build_model(raw, reference.state_dict()),
        config_as_saved(reference),
        sequences,
        references,
        long_sequence,
        run_reference(reference, long_sequence),
    )


def random_split(total: int, rng: random.Random) -> list[int]:
    chunks = []
    while total:
        chunks.append(min(total, rng.choice([1, 1, 2, 3, 5, 8, 9, 31, 64, 100, 200, 257])))
        total -= chunks[-1]
    return chunks


def test_the_sequences_have_no_near_ties(case: Case) -> None:
    for reference in case.references:
        assert reference.margins.min() > MIN_MARGIN


def test_both_spellings_of_the_config_are_one_model(case: Case) -> None:
    saved = {**case.saved, "architectures": PARITY_CONFIGS[case.name]["architectures"]}
    assert resolve_model(saved["architectures"]).parse_config(saved) == case.model.config


def test_every_length_up_to_300_in_one_chunk(case: Case) -> None:
    # The model is causal: row i of one forward of n > i tokens is the answer for length i + 1.
    harness = make_harness(case.model)
    for token_ids, reference in zip(case.sequences, case.references, strict=True):
        logits = harness.run(token_ids, [LENGTH])
        torch.testing.assert_close(logits, reference.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 9, 64, 127])
def test_chunk_sizes(case: Case, chunk: int) -> None:
    harness = make_harness(case.model, block_size=(16, 32, 64, 128)[chunk % 4])
    # Few tokens at a time take longest; behind every window it is the same again.
    widest = 128 if case.name == "gpt-oss-wide-window" else 40
    length = widest + 32 if chunk < 10 else LENGTH
    chunks = [min(chunk, length - first) for first in range(0, length, chunk)]
    logits = harness.run(case.sequences[0][:length], chunks)
    expected = case.references[0].logits[:length]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_every_first_chunk_length(case: Case) -> None:
    # Prefill n tokens, then one more: resuming at n must find everything it needs, for each n.
    harness = make_harness(case.model, num_blocks=600)
    token_ids, reference = case.sequences[1], case.references[1].logits
    # All that are shorter than two blocks or the widest window; behind those, one of each five.
    # A recurrence computes every token by itself, slowly here: a sample of lengths will do.
    every = 8 if case.model.config.recurrences else 1
    lengths = [*range(1, 140, every), *range(140, LENGTH, max(every, 5))]
    for first in range(0, len(lengths), 16):
        group = lengths[first : first + 16]
        live = [harness.add(token_ids) for _ in group]
        ends = harness.step([(sequence, n) for sequence, n in zip(live, group, strict=True)])
        nexts = harness.step([(sequence, 1) for sequence in live])
        for n, end, following in zip(group, ends, nexts, strict=True):
            torch.testing.assert_close(end[-1], reference[n - 1], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(following[0], reference[n], atol=TOLERANCE, rtol=0)
        for sequence in live:
            harness.release(sequence)


@pytest.mark.parametrize(("block_size", "packed"), [(16, False), (64, True)])
def test_batch_mix(case: Case, block_size: int, packed: bool) -> None:
    # Decode rows beside prefill rows, requests of different lengths, drafts that turn out wrong.
    rng = random.Random(block_size)
    harness = make_harness(case.model, block_size, packed=packed)
    live = [harness.add(token_ids) for token_ids in case.sequences]
    plans = [random_split(LENGTH, rng) for _ in live]
    while any(sequence.num_left for sequence in live):
        picked = [i for i, s in enumerate(live) if s.num_left and rng.random() < 0.8]
        starts = [live[i].num_computed for i in picked]
        counts = [min(plans[i].pop(0) if plans[i] else 1, live[i].num_left) for i in picked]
        rejected = [rng.randrange(count) if count <= 4 else 0 for count in counts]
        work = [(live[i], count) for i, count in zip(picked, counts, strict=True)]
        logits = harness.step(work, rejected)
        for i, start, count, num_wrong, rows in zip(
            picked, starts, counts, rejected, logits, strict=True
        ):
            good = count - num_wrong
            expected = case.references[i].logits[start : start + good]
            torch.testing.assert_close(rows[:good], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [LONG_LENGTH, 512])
def test_a_long_sequence(case: Case, chunk: int) -> None:
    assert case.long_reference.margins.min() > MIN_MARGIN
    harness = make_harness(case.model)
    chunks = [min(chunk, LONG_LENGTH - first) for first in range(0, LONG_LENGTH, chunk)]
    logits = harness.run(case.long_sequence, chunks)
    expected = case.long_reference.logits
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_nothing_to_run(case: Case) -> None:
    harness = make_harness(case.model)
    assert harness.step([]) == []
