"""Pools of many gigabytes, in sparse files: offsets that 32 bits do not hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.accelerators.test_elementwise import random
from tests.accelerators.test_paged_attention import make_case
from tests.accelerators.test_recurrent import Runs
from vllm.v1.attention.ops.triton.attention import attend_keys
from vllm.v1.attention.ops.triton.paged_attention import ScorePlan, attend_pages
from vllm.v1.attention.ops.triton.pages import copy_blocks, write_slots
from vllm.v1.attention.ops.triton.registry import get_triton_op

pytestmark = pytest.mark.slow

# Values from one block to the next: of the third block on, 31 bits are too few.
STRIDE = 1 << 30


@pytest.fixture
def values(tmp_path: Path) -> torch.Tensor:
    """Zeros, fp32, for four blocks; of the disk they take what is written."""
    return torch.from_file(str(tmp_path / "pool"), shared=True, size=4 * STRIDE)


def spread(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """Returns a tensor of a shape whose first axis has the large stride."""
    strides = torch.empty(shape, device="meta").stride()
    return values.as_strided(shape, (STRIDE, *strides[1:]))


def test_rows_of_pages(values: torch.Tensor) -> None:
    cache = spread(values, 4, 4, 24)
    blocks, rows = torch.tensor([3, 1, 2]), torch.tensor([3, 0, 1])
    kept = random(1, 3, 24)
    get_triton_op("write_rows")(cache, blocks, rows, kept)
    assert torch.equal(cache[blocks, rows], kept)
    assert torch.equal(get_triton_op("read_rows")(cache, blocks, rows, torch.float32), kept)
    slots = torch.tensor([2 * 4 + 2, 3 * 4 + 1], dtype=torch.int32)
    write_slots(cache, slots, kept[:2])
    assert torch.equal(torch.stack([cache[2, 2], cache[3, 1]]), kept[:2])
    expected = cache[1:].clone()
    copy_blocks([spread(values, 4, 96)], [(3, 2), (2, 1)])
    assert torch.equal(cache[1:], expected[[1, 2, 2]])


def test_attention_to_pages(values: torch.Tensor) -> None:
    case = make_case([(37, 3)], 0, 16, 1, torch.float32)
    used = case.requests.block_ids[:-1]
    cache = spread(values, 4, *case.cache.shape[1:])
    cache[1:] = case.cache[used.long()]
    ids = torch.cat([torch.arange(1, 1 + len(used), dtype=torch.int32), used.new_zeros(1)])
    requests = replace(case.requests, block_ids=ids)
    plan = ScorePlan(0.2)
    expected = attend_pages(case.queries, case.own, case.cache, case.requests, plan, None)
    found = attend_pages(case.queries, case.own, cache, requests, plan, None)
    assert torch.equal(found[0], expected[0])


def test_attention_to_keys_of_many_heads(values: torch.Tensor) -> None:
    queries, keys = random(1, 1, 4, 2, 16), spread(values, 4, 9, 16)[None]
    keys.copy_(random(2, 1, 4, 9, 16))
    expected = attend_keys(queries, keys.contiguous(), keys.contiguous(), None, False, 0.2, 0.0)
    found = attend_keys(queries, keys, keys, None, False, 0.2, 0.0)
    assert torch.equal(found[0], expected[0])


def test_states_in_pages(tmp_path: Path) -> None:
    runs = Runs([(5, True, [2, 5]), (1, False, [1])], is_by_channel=True, page_values=90)
    num_blocks, stride = len(runs.pages), 1 << 25
    assert int(runs.tables.block_ids.max()) * stride > 1 << 31
    values = torch.from_file(str(tmp_path / "states"), shared=True, size=num_blocks * stride)
    runs.pages = values.as_strided(runs.pages.shape, (stride, 1, 1)).copy_(runs.pages)
    runs.check()
