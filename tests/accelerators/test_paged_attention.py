"""Attention that reads pages, against sums written out over whole contexts."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerators.comparing import assert_near
from tests.accelerators.test_elementwise import random
from vllm.v1.attention.ops.triton.paged_attention import PagedRequests, ScorePlan, attend_pages

pytestmark = pytest.mark.slow

NUM_BLOCKS = 60
HEADS, KV_HEADS, WIDTH = 6, 2, 24
ROW = 2 * KV_HEADS * WIDTH


@dataclass
class Case:
    """Requests on NaN pages, with the rows each of them sees."""

    queries: torch.Tensor
    own: torch.Tensor
    cache: torch.Tensor
    requests: PagedRequests
    contexts: list[torch.Tensor]
    spans: list[tuple[int, int]]


def make_case(
    spans: list[tuple[int, int]], window: int, page_rows: int, tile: int, dtype: torch.dtype
) -> Case:
    """Lays requests of (tokens before, tokens of the step) out; tables begin where windows do."""
    num_rows = sum(count for _, count in spans)
    own = random(2, num_rows, ROW, dtype=dtype)
    cache = torch.full((NUM_BLOCKS, page_rows, ROW), torch.nan, dtype=dtype)
    free = iter(
        (torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    )
    ids: list[int] = []
    columns: list[list[int]] = [[] for _ in range(7)]
    tiles: list[tuple[int, int]] = []
    contexts, row = [], 0
    for index, (start, count) in enumerate(spans):
        before = random(10 + index, start, ROW, dtype=dtype)
        low = max(0, start - window + 1) if window else 0
        table: dict[int, int] = {}
        for position in range(low, start):
            block = table.setdefault(position // page_rows, 0) or next(free)
            table[position // page_rows] = block
            cache[block, position % page_rows] = before[position]
        values = (start, count, row, start, low, len(ids), low // page_rows)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        ids += table.values()
        contexts.append(torch.cat([before, own[row : row + count]]))
        tiles += [(index, first) for first in range(0, count, tile)]
        row += count
    tiles.append((-1, 0))
    columns = [
        [request for request, _ in tiles],
        [first for _, first in tiles],
        *columns,
        [*ids, 0],
    ]
    tensors = [torch.tensor(column, dtype=torch.int32) for column in columns]
    queries = random(3, num_rows, HEADS, WIDTH, dtype=dtype)
    return Case(queries, own, cache, PagedRequests(*tensors), contexts, spans)


def attend_explicitly(
    case: Case, plan: ScorePlan, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ``attend_pages`` should, in double precision."""
    outputs, sums, row = [], [], 0
    for (start, count), context in zip(case.spans, case.contexts, strict=True):
        both = context.double().view(-1, 2, KV_HEADS, WIDTH).repeat_interleave(HEADS // KV_HEADS, 2)
        queries = case.queries[row : row + count].double()
        scores = torch.einsum("qhd,khd->hqk", queries, both[:, 0]) * plan.scale
        if plan.soft_cap:
            scores = torch.tanh(scores / plan.soft_cap) * plan.soft_cap
        positions = torch.arange(start, start + count)[:, None]
        keys = torch.arange(start + count)
        hidden = keys > positions
        if plan.window:
            hidden |= keys <= positions - plan.window
        scores = scores.masked_fill(hidden, -torch.inf)
        own_sums = torch.logsumexp(scores, -1)
        total = own_sums if sinks is None else torch.logaddexp(own_sums, sinks.double()[:, None])
        outputs.append(torch.einsum("hqk,khd->qhd", (scores - total[..., None]).exp(), both[:, 1]))
        sums.append(own_sums.t())
        row += count
    return torch.cat(outputs).to(case.queries.dtype), torch.cat(sums).float()


spans = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 12)), min_size=1, max_size=3)


@settings(max_examples=6)
@given(
    spans,
    st.sampled_from([0, 2, 33]),
    st.sampled_from([16, 5]),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 3),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_requests_of_any_length(
    requests: list[tuple[int, int]],
    window: int,
    page_rows: int,
    tile: int,
    splits: int,
    cap: float,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    # Small pages of long contexts would need more blocks than there are.
    requests = requests if page_rows == 16 else [(start % 60, count) for start, count in requests]
    case = make_case(requests, window, page_rows, tile, dtype)
    # Parts are kept of as many queries as a tile here may have.
    places = min(tile, max(count for _, count in requests))
    plan = ScorePlan(0.2, cap, window, tile, splits, places_per_tile=places)
    sinks = random(4, HEADS) if has_sinks else None
    output, sums = attend_pages(case.queries, case.own, case.cache, case.requests, plan, sinks)
    expected = attend_explicitly(case, plan, sinks)
    assert_near(output, expected[0])
    assert_near(sums, expected[1], None if dtype == torch.float32 else 1e-2)


def test_a_query_has_the_same_bits_in_one_chunk_or_two() -> None:
    case = make_case([(90, 12)], 0, 16, 4, torch.float32)
    plan = ScorePlan(0.2, queries_per_tile=4)
    whole, _ = attend_pages(case.queries, case.own, case.cache, case.requests, plan, None)
    # The first seven rows are in pages by the time of the second chunk.
    later = make_case([(97, 5)], 0, 16, 4, torch.float32)
    for position in range(97):
        block = int(later.requests.block_ids[position // 16])
        later.cache[block, position % 16] = case.contexts[0][position]
    own, queries = case.own[7:].contiguous(), case.queries[7:].contiguous()
    second, _ = attend_pages(queries, own, later.cache, later.requests, plan, None)
    assert torch.equal(second, whole[7:])


@settings(max_examples=4)
@given(spans, st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_latent_rows_are_keys_and_values(
    requests: list[tuple[int, int]], splits: int, dtype: torch.dtype
) -> None:
    case = make_case(requests, 0, 16, 4, dtype)
    latent, width = 70, ROW
    queries = random(3, len(case.own), HEADS, width, dtype=dtype)
    plan = ScorePlan(0.2, 0.0, 0, 4, splits, latent)
    output, _ = attend_pages(queries, case.own, case.cache, case.requests, plan, None)
    row = 0
    for (start, count), context in zip(case.spans, case.contexts, strict=True):
        wide = context.double()
        scores = torch.einsum("qhd,kd->hqk", queries[row : row + count].double(), wide) * 0.2
        hidden = torch.arange(start + count) > torch.arange(start, start + count)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,kd->qhd", weights, wide[:, :latent])
        assert_near(output[row : row + count], expected.to(dtype))
        row += count
