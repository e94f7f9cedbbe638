"""What every family of recurrent layers beside latent attention is held to."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import (
    ReferenceRun,
    build_hf_model,
    published_tensors,
    run_reference,
)
from tests.model_executor.models.harness import PagedHarness, Request, is_dense
from tests.model_executor.models.hf_reference import random_tokens
from vllm.model_executor.models.decoder.model import DecoderForCausalLM

TOLERANCE = 1e-3
LENGTH = 300


@dataclass
class Case:
    """A model, and sequences with the reference's logits."""

    raw: dict[str, Any]
    reference: Any
    model: DecoderForCausalLM
    sequences: list[list[int]]
    runs: list[ReferenceRun]


def make_case(raw: dict[str, Any], seed: int = 7) -> Case:
    """Returns the case of a config.json and random weights."""
    reference = build_hf_model(raw, seed)
    sequences = [random_tokens(LENGTH, seed) for seed in (2, 3, 4)]
    runs = [run_reference(reference, token_ids) for token_ids in sequences]
    assert min(float(run.margins.min()) for run in runs) > 1e-5, "a near-tie of a router"
    return Case(raw, reference, build_model(raw, published_tensors(reference)), sequences, runs)


def check_every_length(case: Case, chunk: int, native: int) -> None:
    """Compares every length up to 300, in chunks of one size."""
    # The model is causal: row i of one forward of n > i tokens is the answer for length i + 1.
    harness = make_harness(case.model, (16, 32, 64, 128)[chunk % 4], native=native, packed=True)
    chunks = [min(chunk, LENGTH - first) for first in range(0, LENGTH, chunk)]
    logits = harness.run(case.sequences[0], chunks)
    torch.testing.assert_close(logits, case.runs[0].logits, atol=TOLERANCE, rtol=0)


def check_1500_tokens(case: Case, native: int) -> None:
    """Compares a long prompt, in chunks."""
    token_ids = random_tokens(1500, 5)
    expected = run_reference(case.reference, token_ids)
    assert float(expected.margins.min()) > 2e-6, "a near-tie of a router"
    harness = make_harness(case.model, 32, num_blocks=600, native=native)
    logits = harness.run(token_ids, [1000, 1, 499])
    torch.testing.assert_close(logits, expected.logits, atol=TOLERANCE, rtol=0)


def check_batches_with_rejected_drafts(
    case: Case, block_size: int, packed: bool, native: int
) -> None:
    """Compares random batches, of which some rows are wrong guesses."""
    rng = random.Random(block_size)
    harness = make_harness(case.model, block_size, packed=packed, native=native)
    live = [harness.add(token_ids) for token_ids in case.sequences]
    num_wrong = 0
    while any(sequence.num_left for sequence in live):
        picked = [i for i, s in enumerate(live) if s.num_left and rng.random() < 0.8]
        starts = [live[i].num_computed for i in picked]
        counts = [min(rng.choice([1, 2, 3, 4, 9, 70]), live[i].num_left) for i in picked]
        rejected = [rng.randrange(count) if count <= 4 else 0 for count in counts]
        num_wrong += sum(rejected)
        work = [(live[i], count) for i, count in zip(picked, counts, strict=True)]
        logits = harness.step(work, rejected)
        for i, start, count, wrong, rows in zip(
            picked, starts, counts, rejected, logits, strict=True
        ):
            expected = case.runs[i].logits[start : start + count - wrong]
            torch.testing.assert_close(rows[: count - wrong], expected, atol=TOLERANCE, rtol=0)
    assert num_wrong > 10


def check_unread_rows(case: Case, native: int = 0) -> None:
    """Compares the rows that are wanted, and lets the others be."""
    harness = make_harness(case.model, native=native)
    sequence = harness.add(case.sequences[1])
    sequence.wanted_from = 150
    for start, count in ((0, 100), (100, 100), (200, 100)):
        logits = harness.step([(sequence, count)])[0]
        wanted = max(0, 150 - start)
        expected = case.runs[1].logits[start : start + count][wanted:]
        torch.testing.assert_close(logits[wanted:], expected, atol=TOLERANCE, rtol=0)


def check_every_state(case: Case, native: int) -> None:
    """Resumes at every state that one chunk leaves."""
    harness = make_harness(case.model, 16, num_blocks=600, native=native)
    first = harness.add(case.sequences[2])
    first.keeps_states = True
    harness.step([(first, LENGTH)])
    for boundary in range(16, LENGTH - 5, 16):
        resumed = resume_at(harness, first, boundary)
        logits = harness.step([(resumed, 5)])[0]
        expected = case.runs[2].logits[boundary : boundary + 5]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def resume_at(harness: PagedHarness, first: Request, boundary: int) -> Request:
    """Returns a request that goes on at a unit's end in the blocks of another."""
    resumed = harness.add(first.token_ids)
    resumed.num_computed = boundary
    for i, group in enumerate(harness.layout.groups):
        held, size = first.blocks[i], group.block_size
        if group.state is not None:
            pieces = group.state.num_blocks
            span = range((boundary // size - 1) * pieces, boundary // size * pieces)
        elif is_dense(group):
            span = range(-(-boundary // size))
        else:
            continue  # no rows of an open pool are left at a unit's end
        resumed.blocks[i] = {index: held[index] for index in span}
    return resumed
