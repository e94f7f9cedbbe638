"""Rows of a table are the file's, whatever was kept of earlier ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vllm.model_executor.models.deepseek_v41 import ngram_table
from vllm.model_executor.models.deepseek_v41.ngram_table import NgramTable

NUM_ROWS, WIDTH = 500, 64


def make_table(values: torch.Tensor, scales: torch.Tensor | None = None) -> NgramTable:
    num_scales = 0 if scales is None else scales.shape[1]
    table = NgramTable("t.embed", NUM_ROWS, WIDTH, num_scales, torch.float32, ThreadPoolExecutor(4))
    assert set(table.weight_slots()) == {"t.embed.weight"} | (
        {"t.embed.scale"} if num_scales else set()
    )
    assert all(slot.is_meta for slot in table.weight_slots().values())
    assert table.take("t.embed.weight", values)
    assert scales is None or table.take("t.embed.scale", scales)
    assert not table.take("other.weight", values)
    return table


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("num_kept", [1, 37, 10_000])
def test_rows(kind: str, num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_table, "MOST_KEPT_ROWS", num_kept)
    generator = torch.Generator().manual_seed(1)
    values, scales = torch.randn(NUM_ROWS, WIDTH, generator=generator), None
    expected = values
    if kind == "bfloat16":
        values = values.bfloat16()
        expected = values.float()
    if kind == "fp8":
        values = values.to(torch.float8_e4m3fn)
        scales = torch.randint(120, 134, (NUM_ROWS, 2), generator=generator, dtype=torch.uint8)
        factors = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        expected = values.float() * factors
        scales = scales.view(torch.float8_e8m0fnu)
    table = make_table(values, scales)
    for count in (3, 400, 1, 200, 900):
        rows = torch.randint(0, NUM_ROWS, (count, 2), generator=generator)
        found = table.finish(table.begin(rows))
        assert torch.equal(found, expected[rows.flatten()])


def test_what_is_kept_is_not_read_again() -> None:
    values = torch.randn(NUM_ROWS, WIDTH)
    table = make_table(values)
    rows = torch.arange(100).view(50, 2)
    first = table.finish(table.begin(rows))
    pending = table.begin(rows)
    assert not pending.reads
    assert torch.equal(table.finish(pending), first)
