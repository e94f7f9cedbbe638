"""What must not bring a process down: errors in any thread, forks, tensors that do not fit."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.model_executor.models.decoder.building import build_model, make_harness
from tests.model_executor.models.decoder.reference import build_hf_model, llama
from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.hf_reference import random_tokens
from tests.native.test_deepseek_v4 import make_model
from tests.native.test_library import make_context
from vllm.exceptions import InvariantError
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.deepseek_v4.entries import ChosenEntries
from vllm.native.structs import F32, Matrix
from vllm.v1.attention.metadata import BlockTableView, RequestSlice


@pytest.fixture(scope="module")
def decoder() -> DecoderForCausalLM:
    raw = llama(num_hidden_layers=1)
    return build_model(raw, build_hf_model(raw, seed=3).state_dict())


def step(
    harness: PagedHarness, slices: list[RequestSlice], positions: list[int] | torch.Tensor
) -> torch.Tensor:
    tables = harness.steps.build_metadata(slices, harness.layout)
    where = torch.as_tensor(positions)
    tokens = torch.ones(len(where), dtype=torch.long)
    streams: torch.Tensor = harness.steps.model(tokens, where, tables, harness.kv_caches)
    return streams


def slice_of(start: int, count: int, base: int = 0) -> RequestSlice:
    table = BlockTableView(base, np.array([1], dtype=np.int64))
    return RequestSlice(start, count, (table,), (), 0)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_rows_that_are_not_there_are_refused_before_the_others_are_read(
    decoder: DecoderForCausalLM, threads: int
) -> None:
    harness = make_harness(decoder, native=threads, cache_dtype=torch.bfloat16)
    expected = harness.run([5, 6, 7], [3])
    far = 2**50  # so many keys would be read
    for _ in range(5):
        with pytest.raises(InvariantError, match="needs the row of position 0 of"):
            step(harness, [slice_of(far, 1, base=far // 16)], [far])
        assert torch.equal(harness.run([5, 6, 7], [3]), expected)


def test_a_table_that_ends_too_early_is_refused_before_memory_is_taken(
    decoder: DecoderForCausalLM,
) -> None:
    harness = make_harness(decoder, native=2)
    with pytest.raises(InvariantError, match=r"needs the row of position 1125899906842623 of"):
        step(harness, [slice_of(2**50, 1)], [2**50])


@pytest.mark.parametrize(
    ("positions", "slices", "message"),
    [
        ([0, 2], [slice_of(0, 2)], "positions have gaps"),
        ([-1], [slice_of(-1, 1)], "a position is negative"),
        ([0, 1], [slice_of(0, 3)], "rows are not the step's"),
        ([0, 0, 1], [slice_of(0, 1), slice_of(0, 1)], "rows are not the step's"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(
    decoder: DecoderForCausalLM, positions: list[int], slices: list[RequestSlice], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        step(make_harness(decoder, native=1), slices, positions)


@pytest.mark.parametrize(
    "positions",
    [torch.arange(2, dtype=torch.int32), torch.arange(4)[::2], torch.arange(3), torch.zeros(2)],
)
def test_positions_of_another_kind_are_refused(
    decoder: DecoderForCausalLM, positions: torch.Tensor
) -> None:
    harness = make_harness(decoder, native=1)
    tables = harness.steps.build_metadata([slice_of(0, 2)], harness.layout)
    tokens = torch.ones(2, dtype=torch.long)
    with pytest.raises(InvariantError, match=r"take a contiguous torch.int64 tensor of shape \(2,"):
        harness.steps.model(tokens, positions, tables, harness.kv_caches)


def test_tensors_that_do_not_fit_are_refused() -> None:
    weight, x = torch.randn(5, 8), torch.randn(3, 8)
    matrix = Matrix(weight.data_ptr(), None, 5, 8, 8, F32)
    for bad, output in (
        (x.double(), torch.empty(3, 5)),
        (torch.randn(8, 3).T, torch.empty(3, 5)),
        (x, torch.empty(3, 4)),
        (x, torch.empty(3, 5, dtype=torch.bfloat16)),
    ):
        with pytest.raises(InvariantError, match="the native kernels take a contiguous"):
            make_context(1).matmul(matrix, bad, output)


def test_another_default_type_changes_nothing(decoder: DecoderForCausalLM) -> None:
    harness = make_harness(decoder, native=1)
    expected = harness.run([5, 6, 7], [3])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(harness.run([5, 6, 7], [3]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_that_are_no_numbers_choose_entries_all_the_same() -> None:
    model = make_model()
    found = [layer.attn.entries for layer in model.layers]  # type: ignore[union-attr]
    choosers = [entries for entries in found if isinstance(entries, ChosenEntries)]
    assert choosers
    for entries in choosers:
        entries.wq_b.weight.data.fill_(float("nan"))
    token_ids = random_tokens(150, 2)
    whole, parts = (
        PagedHarness(model, native=2, cache_dtype=torch.bfloat16).run(token_ids, chunks)
        for chunks in ([150], [131, 1, 1, 12, 5])
    )
    assert whole.isfinite().all()
    assert torch.equal(whole, parts)


# In a process of its own: pytest's has other threads, which Python warns of at a fork.
FORKS = """
import gc, os, signal, torch
from tests.native.test_library import make_context, multiply

context, x, weight = make_context(4), torch.randn(64, 512), torch.randn(64, 512)
expected = multiply(context, x, weight)
children = []
for _ in range(8):
    multiply(context, x, weight)  # its threads may be awake, or on their way to sleep
    child = os.fork()
    if not child:
        signal.alarm(60)
        same = all(torch.equal(multiply(context, x, weight), expected) for _ in range(50))
        del context
        gc.collect()
        os._exit(0 if same else 1)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
assert torch.equal(multiply(context, x, weight), expected)
"""
THREADS = """
import concurrent.futures, torch
from tests.native.test_library import make_context, multiply

def work(seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(64, 512, generator=generator), torch.randn(64, 512, generator=generator)
    return [multiply(make_context(1 + i), x, weight) for i in range(8)]

with concurrent.futures.ThreadPoolExecutor(4) as pool:
    for results in pool.map(work, [7] * 8):
        assert all(torch.equal(result, results[0]) for result in results)
print("equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "expected"), [(FORKS, str([0] * 8)), (THREADS, "equal")], ids=["forks", "threads"]
)
def test_contexts_in_other_processes_and_threads(script: str, expected: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert (found.stdout.strip(), found.returncode) == (expected, 0), found.stderr[-2000:]
