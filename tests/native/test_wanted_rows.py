"""Where few rows of a step are read, they and the caches are what they are where all are."""

from collections.abc import Callable

import pytest
import torch

from tests.model_executor.models.decoder.building import make_harness
from tests.model_executor.models.decoder.reference import PARITY_CONFIGS
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.hf_reference import random_tokens
from tests.native.test_decoder import build
from tests.native.test_deepseek_v4 import make_model

# Tokens of each request in each step, and how many of their last rows somebody reads.
STEPS = (
    ((130, 0), (1, 1), (70, 0)),
    ((140, 1), (1, 1), (3, 3)),
    ((1, 1), (1, 1), (129, 2)),
    ((131, 0), (0, 0), (0, 0)),
    ((5, 5), (9, 4), (1, 1)),
)


def run_steps(harness: PagedHarness, *, wants_all: bool) -> list[torch.Tensor]:
    """Return the logits of the rows that are read, step by step and request by request."""
    requests = [harness.add(random_tokens(420, seed)) for seed in range(3)]
    found = []
    for step in STEPS:
        work = []
        for request, (count, num_wanted) in zip(requests, step, strict=True):
            end = request.num_computed + count
            request.wanted_from = 0 if wants_all else end - num_wanted
            if count:
                work.append((request, count))
        wanted = [num_wanted for count, num_wanted in step if count]
        for logits, num_wanted in zip(harness.step(work), wanted, strict=True):
            found.append(logits[len(logits) - num_wanted :])
    return found


def make_v4(threads: int) -> PagedHarness:
    # Entries chosen by an indexer in the last layer, more of them than it lets through.
    model = make_model(num_hidden_layers=3, compress_ratios=[0, 128, 4], index_topk=16)
    return PagedHarness(model, num_blocks=500, native=threads)


def make_decoder(name: str) -> Callable[[int], PagedHarness]:
    return lambda threads: make_harness(
        build(PARITY_CONFIGS[name])[0], num_blocks=400, native=threads
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        make_v4,
        make_decoder("gemma3"),
        make_decoder("gemma4-small"),
        make_decoder("gemma4-moe"),
        make_decoder("gpt-oss"),
        make_decoder("qwen3-moe-step"),
    ],
    ids=["deepseek-v4", "gemma3", "gemma4", "gemma4-moe", "gpt-oss", "qwen3-moe"],
)
def test_wanted_rows_and_caches_have_the_same_bits(
    make: Callable[[int], PagedHarness], threads: int
) -> None:
    whole, part = make(threads), make(threads)
    expected = run_steps(whole, wants_all=True)
    found = run_steps(part, wants_all=False)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(whole.last_streams, part.last_streams), "was anything left out?"
    for name, pages in whole.kv_caches.items():
        assert torch.equal(pages.nan_to_num(7.0), part.kv_caches[name].nan_to_num(7.0)), name
