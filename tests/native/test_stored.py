"""Weights read as they are stored: the bits of the decoded ones, in every build and batch."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model_executor.models.harness import PagedHarness
from tests.model_executor.models.hf_reference import random_tokens
from tests.model_executor.models.tiny_config import tiny_config
from tests.model_executor.published import (
    decode_plainly,
    fill_plain,
    load_stored,
    read_all,
    write_published,
)
from tests.native.test_library import builds, make_context, multiply
from tools.checkpoints.published_spelling import Spelling
from vllm.model_executor.layers.quantization.encode import encode_fp4_groups, encode_fp8_blocks
from vllm.model_executor.layers.quantization.storages import (
    Fp4Groups,
    Fp8Blocks,
    PlainRows,
    StackedRows,
    Storage,
)
from vllm.native.tensors import TensorBinder
from vllm.v1.attention.layout import CacheLayout

BINDER = TensorBinder(CacheLayout((), {}), {})


def store(kind: str, weight: torch.Tensor, group: int) -> Storage:
    """Returns a weight in a storage; ``group`` columns share a scale where that is free."""
    rows, columns = weight.shape
    if kind == "fp4":
        codes, scales = encode_fp4_groups(weight, group)
        made4 = Fp4Groups(rows, columns, group, scales.view(torch.uint8))
        made4.codes.copy_(codes)
        return made4
    is_float = kind == "fp8 float"
    codes, scales = encode_fp8_blocks(weight, (5, group), float_scales=is_float)
    made8 = Fp8Blocks(rows, columns, (5, group), scales if is_float else scales.view(torch.uint8))
    made8.codes.copy_(codes.view(torch.uint8))
    return made8


def decode(source: Storage | StackedRows) -> torch.Tensor:
    rows = torch.empty(source.num_rows, source.num_columns)
    source.write_rows(0, rows)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("build", builds())
@settings(deadline=None, max_examples=25)
@given(
    num_inputs=st.integers(1, 20),
    rows=st.integers(1, 40),
    width=st.sampled_from([2, 16, 32, 48, 90, 128, 160, 704]),
    group=st.sampled_from([16, 32, 50, 128]),
    kind=st.sampled_from(["fp4", "fp8", "fp8 float"]),
)
def test_products_are_those_of_decoded_values(
    build: str, num_inputs: int, rows: int, width: int, group: int, kind: str
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + width + group)
    x = torch.randn(num_inputs, width, generator=generator)
    weight = torch.randn(rows, width, generator=generator)
    stored = store(kind, weight, group)
    context = make_context(1, build)
    output = torch.empty(num_inputs, rows)
    context.matmul(BINDER.rows(stored), x, output)
    assert torch.equal(output, multiply(context, x, decode(stored)))


def test_parts_of_different_kinds_are_one_matrix() -> None:
    weight = torch.randn(30, 64)
    stack = StackedRows(
        PlainRows(weight[:7].bfloat16()),
        StackedRows(store("fp8", weight[7:20], 32), PlainRows(weight[20:21])),
        store("fp4", weight[21:], 32),
    )
    context, x = make_context(2), torch.randn(9, 64)
    output = torch.empty(9, 30)
    context.matmul(BINDER.rows(stack), x, output)
    assert torch.equal(output, multiply(context, x, decode(stack)))


def test_every_e4m3_code() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    stored = Fp8Blocks(256, 16, (1, 16), torch.full((256, 1), 127, dtype=torch.uint8))
    stored.codes.copy_(codes[:, None].expand(256, 16))
    x = torch.zeros(1, 16)
    x[0, 3] = 1.0
    for build in builds():
        output = torch.empty(1, 256)
        make_context(1, build).matmul(BINDER.rows(stored), x, output)
        assert torch.equal(output[0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.slow
@pytest.mark.parametrize(
    "spelling",
    [Spelling(), Spelling(expert_dtype="fp8", float_scales=True), Spelling(group_size=16)],
    ids=["flash", "fp8", "groups of 16"],
)
def test_a_stored_model_is_its_decoded_twin(spelling: Spelling, tmp_path: Path) -> None:
    raw = tiny_config(num_nextn_predict_layers=1)
    folder = write_published(raw, tmp_path, spelling)
    stored = load_stored(folder)
    twin = fill_plain(raw, decode_plainly(read_all(folder), spelling))
    token_ids = random_tokens(150, 11)
    whole = PagedHarness(twin, native=1).run(token_ids, [150])
    alone: torch.Tensor | None = None
    for threads, chunks in ((1, [150]), (2, [131, 1, 1, 12, 5])):
        harness = PagedHarness(stored, native=threads)
        assert harness.steps.model is not stored, "torch ran it"
        output = harness.run(token_ids, chunks)
        # Panels add in another order than plain rows; the values are the same.
        torch.testing.assert_close(output, whole, atol=1e-4, rtol=1e-4)
        assert alone is None or torch.equal(output, alone)
        alone = output
