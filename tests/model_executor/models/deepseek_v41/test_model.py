"""DeepSeek-V4.1 equals a reference from its equations, in any chunks and company."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.model_executor.models.deepseek_v41.reference import Reference, State
from tests.model_executor.models.deepseek_v41.tiny import (
    FOLDED,
    count_block_rows,
    random_weights,
    tiny_v41,
)
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.hf_reference import random_tokens
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.kv_cache import deepseek_v41_kv_cache_specs
from vllm.model_executor.models.deepseek_v41.model import DeepseekV41ForCausalLM
from vllm.v1.attention.ops.registry import get_reference_op

TOLERANCE = 1e-3
# Two steps apart: what rounding alone may do.
SAME = 1e-4
LENGTH = 140


def build_both(seed: int, **overrides: Any) -> tuple[DeepseekV41ForCausalLM, Reference]:
    """Returns our model and the reference, of the same weights."""
    raw = tiny_v41(**overrides)
    model = DeepseekV41ForCausalLM(
        DeepseekV41Config.from_dict(raw), ops=get_reference_op, dtype=torch.float32, device="cpu"
    )
    slots = model.weight_slots()
    tensors = random_weights(slots, raw["n_routed_experts"], seed)
    for name, slot in slots.items():
        if slot.is_meta:
            model.map_weight(name, tensors[name])
        else:
            slot.copy_(tensors[name])
    if raw["engram_layer_ids"]:
        model.bind_folding(np.array(FOLDED, dtype=np.int64))
    return model, Reference(raw, tensors, FOLDED)


@pytest.fixture(scope="module")
def both() -> tuple[DeepseekV41ForCausalLM, Reference]:
    return build_both(3)


def make_harness(model: DeepseekV41ForCausalLM, **options: Any) -> PagedHarness:
    return PagedHarness(model, find_specs=deepseek_v41_kv_cache_specs, num_blocks=400, **options)


def run_reference(reference: Reference, ids: list[int], chunks: Sequence[int]) -> torch.Tensor:
    state, at, logits = State(), 0, []
    for count in chunks:
        logits.append(reference.step(state, ids[at : at + count]))
        at += count
    return torch.cat(logits)


@pytest.mark.parametrize("seed", [3, 8])
def test_numbers_are_those_of_the_reference(seed: int) -> None:
    model, reference = build_both(seed)
    ids = random_tokens(LENGTH, seed)
    expected = run_reference(reference, ids, [LENGTH])
    for chunks in ([LENGTH], [1] * 12 + [33, 9, 2, LENGTH - 56], [125, *[1] * 15]):
        logits = make_harness(model).run(ids, chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "overrides",
    [
        {"engram_layer_ids": [], "image_token_id": None},
        {"candidate_source_layer_id": None},
        {"index_topk": 500},
        {"candidate_topk_blocks": 1},
        {"candidate_topk_blocks": 1, "index_topk": 30},
        {"compress_ratios": [4, 4, 4, 4, 4, 4, 4, 4, 4, 4], "kv_source_layer_ids": [0]}
        | {"index_source_layer_ids": [0, 3], "candidate_source_layer_id": None},
        {"hc_mult": 2, "sliding_window": 20, "engram_max_ngram_size": 3},
    ],
    ids=str,
)
def test_other_shapes_of_the_layout(overrides: dict[str, Any]) -> None:
    model, reference = build_both(5, **overrides)
    ids = random_tokens(90, 4)
    expected = run_reference(reference, ids, [90])
    logits = make_harness(model, packed=True).run(ids, [50, 1, 7, 32])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_a_table_above_the_cut_may_have_no_row_to_serve() -> None:
    """Its layer computes a prompt's end alone, which the first chunk has nothing of."""
    model, reference = build_both(5, engram_layer_ids=[1, 5, 8])
    ids = random_tokens(90, 4)
    expected = run_reference(reference, ids, [90])
    for native in (0, 1):
        harness = make_harness(model, native=native)
        request = harness.add(ids)
        request.output_from = 89
        logits = [harness.step([(request, count)])[0] for count in (20, 40, 30)][-1]
        torch.testing.assert_close(logits[-1], expected[-1], atol=TOLERANCE, rtol=0)


def test_chunks_and_company_change_nothing(both: tuple[DeepseekV41ForCausalLM, Reference]) -> None:
    model, _ = both
    rng = random.Random(2)
    sequences = [random_tokens(rng.randrange(30, 110), seed) for seed in range(5)]
    alone = [make_harness(model).run(ids, [len(ids)]) for ids in sequences]
    harness = make_harness(model)
    requests = [harness.add(ids) for ids in sequences]
    together: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(request.num_left for request in requests):
        live = [i for i, request in enumerate(requests) if request.num_left]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        counts = [min(requests[i].num_left, rng.choice([1, 2, 5, 8, 40])) for i in chosen]
        wrong = [rng.randrange(n) if 1 < n <= 8 else 0 for n in counts]
        work = [(requests[i], n) for i, n in zip(chosen, counts, strict=True)]
        for i, logits, bad in zip(chosen, harness.step(work, wrong), wrong, strict=True):
            together[i].append(logits[: len(logits) - bad])
    for parts, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, atol=SAME, rtol=0)


def test_an_image_token_ends_ngrams(both: tuple[DeepseekV41ForCausalLM, Reference]) -> None:
    model, reference = both
    ids = random_tokens(40, 9)
    ids[10] = ids[30] = 95
    expected = run_reference(reference, ids, [40])
    logits = make_harness(model).run(ids, [11, 1, 28])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "chunks", [[100], [33, 33, 34], [64, 35, 1], [9] * 11 + [1], [40, 5, 30, 8, 17]], ids=str
)
def test_the_decoder_leaves_out_what_no_output_depends_on(
    both: tuple[DeepseekV41ForCausalLM, Reference], chunks: list[int], monkeypatch: Any
) -> None:
    model, reference = both
    ids = random_tokens(120, 6)
    counts = count_block_rows(monkeypatch)
    expected = run_reference(reference, ids, [120])
    harness = make_harness(model)
    alone, other = harness.add(ids), harness.add(random_tokens(120, 7))
    alone.output_from = 99
    logits = torch.empty(0)
    for index, count in enumerate(chunks):
        # In company of a request all of whose rows are read, every other step.
        work = [(alone, count)] + ([(other, 12)] if index % 2 else [])
        logits = harness.step(work)[0]
    torch.testing.assert_close(logits[-1], expected[99], atol=TOLERANCE, rtol=0)
    if chunks == [100]:
        # Behind layer 5 each layer computes seven rows less than the one before it.
        assert counts == [100] * 5 + [36, 29, 22, 15, 8]
    alone.output_from = 0
    logits = torch.cat([harness.step([(alone, count)])[0] for count in (1, 1, 18)])
    torch.testing.assert_close(logits, expected[100:], atol=TOLERANCE, rtol=0)
