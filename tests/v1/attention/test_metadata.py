"""The index tables against a brute-force oracle that thinks token by token."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm.exceptions import InvariantError
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.metadata import BlockTableView, RequestSlice, build_step_metadata
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES
from vllm.v1.attention.step_tables import PageRows, StepMetadata

WINDOW = 12
LAYOUT = CacheLayout(
    groups=(
        GroupLayout("window", 8, 8, window=WINDOW),
        GroupLayout("dense", 16, 4, ratio=4),
        GroupLayout("dense", 32, 2, ratio=16),
        GroupLayout("state", 2, 2, ratio=4, has_overlap=True),
        GroupLayout("state", 4, 4, ratio=16),
    ),
    group_of={},
)

Address = tuple[int, int]


def first_needed(group: GroupLayout, position: int) -> int:
    """Oracle: the least position whose row some later token reads."""
    if group.kind == "dense":
        return 0
    if group.kind == "window":
        return max(0, position + 1 - WINDOW)
    start = position
    while start % group.ratio:
        start -= 1
    return max(0, start - group.ratio) if group.has_overlap else start


class Tables:
    """Random private tables, and the position behind each address."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next_id = 1
        self.position_of: list[dict[Address, tuple[int, int]]] = [{} for _ in LAYOUT.groups]
        self.slices: dict[int, RequestSlice] = {}

    def make_slice(
        self,
        request: int,
        start: int,
        count: int,
        write_from: tuple[int, ...] = (),
        read_from: int = 0,
    ) -> RequestSlice:
        tables = []
        for group_id, group in enumerate(LAYOUT.groups):
            end = start + count
            kept = set()
            for low, high in (
                (first_needed(group, start), start),
                (first_needed(group, end), end),
            ):
                stored = max(low, read_from) if group.kind == "window" else low
                kept |= {position // group.block_size for position in range(stored, high)}
            base = min(kept, default=3) - (self.rng.random() < 0.3 and min(kept, default=0) > 0)
            ids = np.zeros(max(kept, default=base - 1) - base + 1, dtype=np.int64)
            for index in kept:
                ids[index - base] = self.next_id
                stride = group.block_size // group.rows_per_block
                for row in range(group.rows_per_block):
                    where = (request, index * group.block_size + row * stride)
                    self.position_of[group_id][self.next_id, row] = where
                self.next_id += 1
            tables.append(BlockTableView(int(base), ids))
        found = RequestSlice(start, count, tuple(tables), write_from, read_from)
        self.slices[request] = found
        return found

    def make_bounded_slice(self, request: int, start: int, count: int) -> RequestSlice:
        """Writes some groups from later on, and reads no window rows from before some position."""
        entries, *others = (start + self.rng.randrange(-3, count + 20) for _ in range(4))
        write_from = (others[0], entries, entries, *others[1:])
        return self.make_slice(request, start, count, write_from, self.rng.randrange(start + 1))

    def is_written(self, group_id: int, request: int, position: int) -> bool:
        write_from = self.slices[request].write_from
        return not write_from or position >= write_from[group_id]

    def read(self, group_id: int, page_rows: PageRows) -> list[tuple[int, int]]:
        return [
            self.position_of[group_id][block, row]
            for block, row in zip(
                page_rows.blocks.flatten().tolist(), page_rows.rows.flatten().tolist(), strict=True
            )
        ]


def build_case(seed: int) -> tuple[Tables, list[tuple[int, int]], StepMetadata]:
    rng = random.Random(seed)
    tables = Tables(rng)
    work = [
        (rng.choice([0, 0, 1, 3, 4, 11, 12, 15, 16, 31, rng.randrange(100)]), count)
        for count in rng.choices([1, 1, 1, 2, 3, 4, 5, 8, 9, 33, 300], k=rng.randrange(1, 8))
    ]
    slices = [
        (tables.make_bounded_slice if rng.random() < 0.3 else tables.make_slice)(r, start, count)
        for r, (start, count) in enumerate(work)
    ]
    return tables, work, build_step_metadata(slices, LAYOUT, "cpu")


def flat_rows(work: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields (request, position) of each flat row."""
    for request, (start, count) in enumerate(work):
        for position in range(start, start + count):
            yield request, position


@pytest.mark.parametrize("seed", range(40))
def test_writes(seed: int) -> None:
    tables, work, meta = build_case(seed)
    rows = list(flat_rows(work))
    assert meta.num_tokens == len(rows)
    for group_id, group in enumerate(LAYOUT.groups):
        if group.kind == "dense":
            expected = [
                (request, position + 1 - group.ratio)
                for request, position in rows
                if (position + 1) % group.ratio == 0
                and tables.is_written(group_id, request, position)
            ]
            assert tables.read(group_id, meta.entries[group_id].target) == expected
            continue
        part = meta.windows[group_id] if group.kind == "window" else meta.states[group_id]
        sources = range(len(rows)) if part.writes.sources is None else part.writes.sources.tolist()
        written = tables.read(group_id, part.writes.target)
        assert [rows[source] for source in sources] == written
        stored = set(tables.position_of[group_id].values())
        wanted = {row for row in rows if tables.is_written(group_id, *row)}
        assert set(written) == stored & wanted


@pytest.mark.parametrize("seed", range(40))
def test_completed_windows(seed: int) -> None:
    tables, work, meta = build_case(seed)
    rows = list(flat_rows(work))
    for group_id, group in enumerate(LAYOUT.groups):
        if group.kind != "state":
            continue
        state = meta.states[group_id]
        assert state.phases.tolist() == [position % group.ratio for _, position in rows]
        source = tables.read(group_id, state.prior) + rows
        dense_id = {4: 1, 16: 2}[group.ratio]
        done = [
            (r, p + 1 - group.ratio)
            for r, p in rows
            if (p + 1) % group.ratio == 0 and tables.is_written(dense_id, r, p)
        ]
        assert state.num_completed == len(done)
        assert state.entry_positions.tolist() == [first for _, first in done]
        for index, (request, first) in enumerate(done):
            found = [source[row] for row in state.windows[index].tolist()]
            assert found == [(request, first + offset) for offset in range(group.ratio)]
            if state.previous_windows is None:
                assert not group.has_overlap
                continue
            lacks = state.no_previous is not None and bool(state.no_previous[index])
            assert lacks == (first == 0)
            if not lacks:
                found = [source[row] for row in state.previous_windows[index].tolist()]
                assert found == [(request, first - group.ratio + o) for o in range(group.ratio)]


def visible(row: torch.Tensor) -> list[bool]:
    assert set(row.tolist()) <= {0.0, float("-inf")}
    return [value == 0.0 for value in row.tolist()]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("ratio", "dense_group"), [(0, None), (4, 1), (16, 2)])
def test_each_query_sees_exactly_its_keys(seed: int, ratio: int, dense_group: int | None) -> None:
    tables, work, meta = build_case(seed)
    rows = list(flat_rows(work))
    plan = meta.plans[WINDOW, ratio]
    seen: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    nobody = (-1, -1)
    for index, decode in enumerate(meta.decodes):
        flat = list(range(len(rows))) if decode.rows is None else decode.rows.tolist()
        kept = range(len(flat)) if decode.kept is None else decode.kept.tolist()
        assert len(flat) == decode.num_requests * decode.num_queries
        if decode.kept_rows is not None:
            assert decode.kept_rows.tolist() == [flat[index] for index in kept]
        reads = meta.windows[0].decode_reads[index]
        width = reads.source.blocks.shape[1]
        window_keys = tables.read(0, reads.source)
        entry_keys, num_entries = [], 0
        if dense_group is not None:
            entry_reads = meta.entries[dense_group].decode_reads[index]
            num_entries = entry_reads.source.blocks.shape[1]
            entry_keys = tables.read(dense_group, entry_reads.source)
            assert entry_reads.min_length == min(entry_reads.lengths.tolist())
        for padded in kept:
            b, q = divmod(padded, decode.num_queries)
            request, position = rows[flat[padded]]
            own = [rows[row] for row in flat[b * decode.num_queries :][: decode.num_queries]]
            # Both sides of the recent rows are filled up, so that nothing moves an entry.
            recent = [nobody] * (WINDOW - 1 - width)
            recent += window_keys[b * width : (b + 1) * width] + own
            recent += [nobody] * (MAX_DECODE_QUERIES - len(own))
            keys = recent + entry_keys[b * num_entries : (b + 1) * num_entries]
            is_seen = visible(plan.decode_masks[index][b, q, 0])
            picked = [key for key, is_in in zip(keys, is_seen, strict=True) if is_in]
            assert all(owner == request for owner, _ in picked)
            split = sum(is_seen[: len(recent)])
            assert len(picked) == len(set(picked[:split])) + len(set(picked[split:]))
            assert (request, position) not in seen
            seen[request, position] = (
                {p // ratio for _, p in picked[split:]},
                {p for _, p in picked[:split]},
            )
    for index, chunk in enumerate(meta.chunks):
        request = rows[chunk.rows.start][0]
        local = tables.read(0, meta.windows[0].chunk_reads[index]) + rows[chunk.rows]
        entries: list[tuple[int, int]] = []
        if dense_group is not None:
            entries = tables.read(dense_group, meta.entries[dense_group].chunk_reads[index])
            assert entries == [(request, k * ratio) for k in range(len(entries))]
        for tile in plan.chunk_tiles[index]:
            keys = entries[: tile.num_entries] + local[tile.window_keys]
            for q, (owner, position) in enumerate(rows[chunk.rows][tile.queries]):
                tail = visible(tile.tail_mask[0, q, 0])
                is_seen = [True] * (len(keys) - len(tail)) + tail
                assert len(keys) - len(tail) == tile.num_common
                seen[owner, position] = (
                    {k for k in range(tile.num_entries) if is_seen[k]},
                    {
                        key[1]
                        for key, is_in in zip(
                            keys[tile.num_entries :], is_seen[tile.num_entries :], strict=True
                        )
                        if is_in
                    },
                )
    assert set(seen) == set(rows)
    for (request, position), (entry_set, window_set) in seen.items():
        assert entry_set == (set(range((position + 1) // ratio)) if ratio else set())
        first = max(tables.slices[request].read_from, position - WINDOW + 1)
        assert window_set == set(range(first, position + 1))


def test_requests_without_tokens_are_ignored() -> None:
    tables = Tables(random.Random(0))
    slices = [tables.make_slice(0, 5, 0), tables.make_slice(1, 3, 1)]
    meta = build_step_metadata(slices, LAYOUT, "cpu")
    assert meta.num_tokens == 1
    assert [decode.num_requests for decode in meta.decodes] == [1]
    assert meta.decodes[0].rows is None


def test_bounds_that_contradict_each_other_are_named() -> None:
    tables = Tables(random.Random(0))
    uneven = LAYOUT.groups[1]
    layout = CacheLayout((*LAYOUT.groups, uneven), {})
    good = tables.make_slice(0, 20, 8, (0, 24, 0, 0, 0))
    bad = replace(good, tables=(*good.tables, good.tables[1]), write_from=(0, 24, 0, 0, 0, 28))
    with pytest.raises(InvariantError, match=r"ratio 4 write from different .*24.*28"):
        build_step_metadata([bad], layout, "cpu")
    with pytest.raises(InvariantError, match=r"read from \[21\] in steps from \[20\]"):
        build_step_metadata([replace(good, read_from=21)], LAYOUT, "cpu")


def test_long_contexts_do_not_pad_short_ones() -> None:
    tables = Tables(random.Random(0))
    starts = [5, 4095, 4096, 9000, 20000, 30000]
    slices = [tables.make_slice(r, start, 1) for r, start in enumerate(starts)]
    meta = build_step_metadata(slices, LAYOUT, "cpu")
    assert [decode.rows.tolist() for decode in meta.decodes if decode.rows is not None] == [
        [0, 1],
        [2],
        [3],
        [4, 5],
    ]


def test_decodes_with_drafts_are_batched_and_padded_at_most_twofold() -> None:
    tables = Tables(random.Random(0))
    counts = [4, 1, 2, 3, 8, 1, 5, 9]
    slices = [tables.make_slice(r, 40 + r, count) for r, count in enumerate(counts)]
    meta = build_step_metadata(slices, LAYOUT, "cpu")
    shapes = [(decode.num_requests, decode.num_queries) for decode in meta.decodes]
    assert shapes == [(2, 1), (1, 2), (2, 4), (2, 8)]
    assert [chunk.num_tokens for chunk in meta.chunks] == [9]
    padded = meta.decodes[2]
    assert padded.rows is not None
    assert padded.kept is not None
    assert padded.rows.tolist() == [0, 1, 2, 3, 7, 8, 9, 9]
    assert padded.kept.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_taking_and_putting_rows_of_a_padded_batch() -> None:
    tables = Tables(random.Random(0))
    slices = [tables.make_slice(r, 20, count) for r, count in enumerate([1, 3, 4])]
    decode = build_step_metadata(slices, LAYOUT, "cpu").decodes[1]
    values = torch.arange(8.0).unsqueeze(1)
    taken = decode.take(values)
    assert taken.squeeze(2).tolist() == [[1, 2, 3, 3], [4, 5, 6, 7]]
    output = torch.zeros_like(values)
    taken[0, 3] = 99.0  # the padding goes nowhere
    decode.put(taken, output)
    assert output.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("group_id", range(len(LAYOUT.groups)))
@pytest.mark.parametrize("count", [1, 20])
def test_a_missing_row_is_named(group_id: int, count: int) -> None:
    tables = Tables(random.Random(1))
    good = tables.make_slice(0, 31, count)
    group = LAYOUT.groups[group_id]
    broken = list(good.tables)
    broken[group_id].block_ids[:] = 0
    with pytest.raises(InvariantError, match=rf"I5: .*{group.kind} group"):
        build_step_metadata([RequestSlice(31, count, tuple(broken))], LAYOUT, "cpu")
