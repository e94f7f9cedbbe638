"""DeepSeek-V4.1 on the native kernels: the reference's numbers, the same bits in any company."""

import ctypes
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.model_executor.models.deepseek_v41.test_model import (
    TOLERANCE,
    build_both,
    run_reference,
)
from tests.model_executor.models.harness import PagedHarness, Request
from tests.model_executor.models.hf_reference import random_tokens
from tests.native.test_library import builds, make_context
from vllm.exceptions import InvariantError
from vllm.model_executor.models.deepseek_v41.kv_cache import deepseek_v41_kv_cache_specs
from vllm.model_executor.models.deepseek_v41.model import DeepseekV41ForCausalLM
from vllm.model_executor.models.deepseek_v41.ngram_table import PendingRows
from vllm.native.deepseek_v41 import NativeDeepseekV41
from vllm.native.library import _NO_ROWS, _place_rows

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "no tables": {"engram_layer_ids": [], "image_token_id": None},
    "no candidates": {"candidate_source_layer_id": None},
    "nothing to choose": {"index_topk": 500},
    "few candidates": {"candidate_topk_blocks": 1, "index_topk": 30},
    "ratio 4": {
        "compress_ratios": [4] * 10,
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 3],
        "candidate_source_layer_id": None,
    },
    "two streams": {"hc_mult": 2, "sliding_window": 20, "engram_max_ngram_size": 3},
}


def make_harness(model: DeepseekV41ForCausalLM, threads: int, **options: Any) -> PagedHarness:
    return PagedHarness(
        model,
        find_specs=deepseek_v41_kv_cache_specs,
        **{"num_blocks": 400, "native": threads, **options},
    )


@pytest.fixture(scope="module")
def model() -> DeepseekV41ForCausalLM:
    return build_both(3)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_those_of_the_reference(shape: str) -> None:
    model, reference = build_both(5, **SHAPES[shape])
    ids = random_tokens(120, 4)
    expected = run_reference(reference, ids, [120])
    logits = make_harness(model, 2, packed=True).run(ids, [70, 1, 7, 1, 41])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    by_torch = make_harness(model, 0).run(ids, [120])
    assert not torch.equal(logits, by_torch), "the same bits: was it the same code?"


def draw_sequences(rng: random.Random) -> list[list[int]]:
    return [random_tokens(rng.randrange(40, 200), seed) for seed in range(8)]


@pytest.fixture(scope="module")
def alone(model: DeepseekV41ForCausalLM) -> list[torch.Tensor]:
    sequences = draw_sequences(random.Random(11))
    return [make_harness(model, 1).run(ids, [len(ids)]) for ids in sequences]


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_batch_chunks_drafts_or_threads(
    model: DeepseekV41ForCausalLM, alone: list[torch.Tensor], threads: int
) -> None:
    rng = random.Random(11)
    sequences = draw_sequences(rng)
    harness = make_harness(model, threads, num_blocks=900)
    requests = [harness.add(ids) for ids in sequences]
    together: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(request.num_left for request in requests):
        live = [i for i, request in enumerate(requests) if request.num_left]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        counts = [min(requests[i].num_left, rng.choice([1, 1, 2, 5, 8, 60])) for i in chosen]
        wrong = [rng.randrange(n) if 1 < n <= 8 else 0 for n in counts]
        work = [(requests[i], n) for i, n in zip(chosen, counts, strict=True)]
        for i, logits, bad in zip(chosen, harness.step(work, wrong), wrong, strict=True):
            together[i].append(logits[: len(logits) - bad])
    for parts, expected in zip(together, alone, strict=True):
        assert torch.equal(torch.cat(parts), expected)


def run_prompts(harness: PagedHarness, seed: int, *, is_lazy: bool) -> list[torch.Tensor]:
    """Returns the logits of prompts' ends and of tokens behind them, in random company."""
    rng = random.Random(seed)
    requests: list[Request] = []
    lengths = [rng.randrange(2, 160) for _ in range(4)]
    for index, length in enumerate(lengths):
        requests.append(harness.add(random_tokens(length + 6, 100 * seed + index)))
    found: list[list[torch.Tensor]] = [[] for _ in requests]
    while any(request.num_left for request in requests):
        live = [i for i, request in enumerate(requests) if request.num_left]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        work = []
        for i in chosen:
            request, left = requests[i], lengths[i] - requests[i].num_computed
            count = min(left, rng.choice([1, 7, 20, 64, 100])) if left > 0 else 1
            end = request.num_computed + count
            request.output_from = max(lengths[i], end) - 1 if is_lazy else 0
            request.wanted_from = end if end < lengths[i] else end - 1
            work.append((request, count))
        for i, logits in zip(chosen, harness.step(work), strict=True):
            if requests[i].num_computed >= lengths[i]:
                found[i].append(logits[-1])
    return [torch.stack(parts) for parts in found]


@pytest.fixture(scope="module")
def eager(model: DeepseekV41ForCausalLM) -> list[list[torch.Tensor]]:
    return [run_prompts(make_harness(model, 1), seed, is_lazy=False) for seed in range(6)]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_lazy_decoder_has_the_same_bits(
    model: DeepseekV41ForCausalLM, eager: list[list[torch.Tensor]], threads: int
) -> None:
    for seed, whole in enumerate(eager):
        lazy = run_prompts(make_harness(model, threads), seed, is_lazy=True)
        for one, other in zip(whole, lazy, strict=True):
            assert torch.equal(one, other)


def test_vector_builds_give_the_same_bits(model: DeepseekV41ForCausalLM) -> None:
    names = [name for name in builds() if name != "portable"]
    if len(names) < 2:
        pytest.skip("this processor runs one vector build only")
    logits = []
    for name in names:
        harness = make_harness(model, 1)
        run = NativeDeepseekV41(model, harness.layout, harness.kv_caches, make_context(1, name))
        harness.steps = replace(harness.steps, model=run)
        logits.append(harness.run(random_tokens(60, 4), [50, 10]))
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


def test_an_image_token_ends_ngrams_and_takes_nothing() -> None:
    model, reference = build_both(3)
    ids = random_tokens(40, 9)
    ids[10] = ids[30] = 95
    expected = run_reference(reference, ids, [40])
    logits = make_harness(model, 1).run(ids, [11, 1, 28])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_a_narrow_cache_rounds_alike_in_chunks_and_pages(model: DeepseekV41ForCausalLM) -> None:
    ids = random_tokens(90, 2)
    whole, parts = (
        make_harness(model, 1, cache_dtype=torch.bfloat16).run(ids, chunks)
        for chunks in ([90], [1, 30, 1, 33, 25])
    )
    assert torch.equal(whole, parts)


def hold_rows(model: DeepseekV41ForCausalLM, wait: Callable[[], None]) -> None:
    """Lets a function run before the rows of the second table are ready."""
    table = model.tables[4]
    finish = table.finish

    def finish_late(pending: PendingRows) -> torch.Tensor:
        wait()
        return finish(pending)

    table.finish = finish_late  # type: ignore[method-assign]
    table._kept_rows[:] = -1


def test_layers_run_while_rows_of_tables_are_read() -> None:
    model, reference = build_both(3)
    ids = random_tokens(60, 4)
    harness = make_harness(model, 2)
    window = harness.kv_caches["layers.3.attn.window"]
    seen: list[bool] = []

    def wait() -> None:
        deadline = time.monotonic() + 20
        while window.isnan().all() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(not window.isnan().all())

    hold_rows(model, wait)
    logits = harness.run(ids, [60])
    assert seen == [True], "layer 4 waits for its rows, those before it do not"
    expected = run_reference(reference, ids, [60])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_rows_that_cannot_be_read_are_an_error_and_the_next_step_runs() -> None:
    model, reference = build_both(3)
    ids = random_tokens(40, 4)
    harness = make_harness(model, 2)
    finish = model.tables[4].finish

    def fail() -> None:
        raise OSError("the disk is gone")

    hold_rows(model, fail)
    with pytest.raises(OSError, match="disk is gone"):
        harness.run(ids, [40])
    model.tables[4].finish = finish  # type: ignore[method-assign]
    logits = make_harness(model, 2).run(ids, [40])
    torch.testing.assert_close(logits, run_reference(reference, ids, [40]), atol=TOLERANCE, rtol=0)


def test_layers_do_not_wait_for_reads_that_are_called_off() -> None:
    rows, read = (ctypes.c_void_p * 1)(), Future[torch.Tensor]()
    read.cancel()
    _place_rows(rows, 0, read)
    assert rows[0] == _NO_ROWS


def test_a_missing_row_is_an_invariant_error(model: DeepseekV41ForCausalLM) -> None:
    harness = make_harness(model, 1)
    sequence = harness.add(random_tokens(40, 1))
    harness.step([(sequence, 39)])
    for blocks in sequence.blocks:
        for index in blocks:
            blocks[index] = 0
    with pytest.raises(InvariantError, match=r"needs the row of position \d+ .* table stores none"):
        harness.step([(sequence, 1)])
