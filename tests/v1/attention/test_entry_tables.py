"""Steps that are laid out on a device say what the same steps say that the host lays out."""

import random

import pytest
import torch

from tests.v1.attention.test_metadata import LAYOUT, Tables, flat_rows
from vllm.v1.attention.entry_tables import DecodeShape, EntryTables
from vllm.v1.attention.metadata import build_step_metadata
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES, StepBatch
from vllm.v1.attention.step_tables import PageRows, StepMetadata

CPU = torch.device("cpu")
LIMIT = 128
QUERIES = 4

Row = tuple[int, int]


class Case:
    """A decode step, and its tables by both ways."""

    def __init__(self, seed: int, num_queries: int = QUERIES) -> None:
        rng = random.Random(seed)
        self.tables = Tables(rng)
        starts = [0, 1, 3, 4, 11, 12, 15, 16, 31, rng.randrange(100)]
        self.work = [
            (rng.choice(starts), rng.randint(1, num_queries)) for _ in range(rng.randint(1, 5))
        ]
        slices = [
            self.tables.make_slice(request, start, count, (), rng.choice((0, 0, start // 2)))
            for request, (start, count) in enumerate(self.work)
        ]
        self.rows = list(flat_rows(self.work))
        self.host = build_step_metadata(slices, LAYOUT, CPU)
        self.batch = StepBatch.from_slices(slices, CPU)
        self.shape = DecodeShape(num_queries, len(slices) + rng.randrange(3), LIMIT)
        laid_out = EntryTables(LAYOUT, {}, [self.shape], CPU)
        laid_out.lay_out(slices, self.shape)
        expanded = laid_out.expand(self.shape)
        self.device = expanded.meta
        # Flat rows of the captured step; those of requests that are none belong to nobody.
        self.padded: list[Row | None] = []
        for request in range(self.shape.num_requests):
            for query in range(num_queries):
                own = None
                if request < len(self.work) and query < self.work[request][1]:
                    own = (request, self.work[request][0] + query)
                self.padded.append(own)

    def read(self, group_id: int, rows: PageRows) -> list[Row | None]:
        """The request and position of addresses; None: of the null block."""
        known = self.tables.position_of[group_id]
        blocks, places = rows.blocks.flatten().tolist(), rows.rows.flatten().tolist()
        return [
            known[block, row] if block else None for block, row in zip(blocks, places, strict=True)
        ]

    def read_stored(self, group_id: int, meta: StepMetadata, part: str) -> dict[int, list[Row]]:
        """By request the stored rows that its decode batch reads, in order."""
        on_host = meta is self.host
        batches = self.batch.decode_requests if on_host else (range(len(self.work)),)
        found: dict[int, list[Row]] = {}
        for requests, reads in zip(
            batches, getattr(meta, part)[group_id].decode_reads, strict=True
        ):
            positions = self.read(group_id, reads.source)
            width = reads.source.blocks.shape[1]
            for number, request in enumerate(requests):
                own = positions[number * width : (number + 1) * width]
                length = int(reads.lengths[number])
                # Window rows: the last ones count; entries: the first ones.
                kept = own[width - length :] if part == "windows" else own[:length]
                assert None not in kept
                found[int(request)] = [row for row in kept if row is not None]
        return found


@pytest.mark.parametrize("seed", range(40))
def test_stored_rows_that_are_read(seed: int) -> None:
    case = Case(seed)
    for group_id, group in enumerate(LAYOUT.groups):
        part = {"window": "windows", "dense": "entries"}.get(group.kind)
        if part is not None:
            host = case.read_stored(group_id, case.host, part)
            assert case.read_stored(group_id, case.device, part) == host
            assert host.keys() == set(range(len(case.work)))


@pytest.mark.parametrize("seed", range(40))
def test_rows_and_entries_that_are_written(seed: int) -> None:
    case = Case(seed)
    for group_id, group in enumerate(LAYOUT.groups):
        if group.kind == "dense":
            host = case.read(group_id, case.host.entries[group_id].target)
            device = case.read(group_id, case.device.entries[group_id].target)
            assert [row for row in device if row is not None] == host
            continue
        parts = {"window": "windows", "state": "states"}[group.kind]
        device = case.read(group_id, getattr(case.device, parts)[group_id].writes.target)
        host = case.read(group_id, getattr(case.host, parts)[group_id].writes.target)
        assert [row for row in device if row is not None] == host
        assert all(row is None or row == own for row, own in zip(device, case.padded, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_what_completed_entries_are_made_of(seed: int) -> None:
    case = Case(seed)
    dense_of = {LAYOUT.groups[i].ratio: i for i in (1, 2)}
    for group_id, group in enumerate(LAYOUT.groups):
        if group.kind != "state":
            continue
        made = []
        for meta, own in ((case.host, case.rows), (case.device, case.padded)):
            state = meta.states[group_id]
            source = [*case.read(group_id, state.prior), *own]
            targets = case.read(dense_of[group.ratio], meta.entries[dense_of[group.ratio]].target)
            entries = {}
            for index, target in enumerate(targets):
                if target is None:
                    continue  # a window that the step leaves open
                rows = [source[row] for row in state.windows[index].tolist()]
                before = None
                if state.previous_windows is not None and not (
                    state.no_previous is not None and bool(state.no_previous[index])
                ):
                    before = [source[row] for row in state.previous_windows[index].tolist()]
                entries[target] = rows, before, int(state.entry_positions[index])
            made.append(entries)
        assert made[0] == made[1]


@pytest.mark.parametrize("seed", range(40))
def test_what_queries_see(seed: int) -> None:
    case = Case(seed)
    for key, plan in case.device.plans.items():
        window, ratio = key
        (masks,) = plan.decode_masks
        for requests, mask in zip(
            case.batch.decode_requests, case.host.plans[key].decode_masks, strict=True
        ):
            for number, request in enumerate(requests):
                for query in range(case.work[request][1]):
                    wanted, found = mask[number, query, 0] == 0, masks[request, query, 0] == 0
                    num_rows = window - 1 + MAX_DECODE_QUERIES
                    start = case.work[request][0]
                    host_rows = wanted[:num_rows]
                    # On the device a query's own row stands for what is before a prompt.
                    assert torch.equal(found[:num_rows], host_rows), (start, query)
                    host_entries = int(wanted[num_rows:].sum())
                    assert int(found[num_rows:].sum()) == host_entries
                    assert bool(found[num_rows:][:host_entries].all())
                    assert bool(ratio) or not host_entries


def test_a_step_of_single_tokens_needs_no_map() -> None:
    case = Case(3, num_queries=1)
    assert case.device.num_tokens == case.shape.num_requests
    for group_id, group in enumerate(LAYOUT.groups):
        if group.kind == "window":
            host = case.read_stored(group_id, case.host, "windows")
            assert case.read_stored(group_id, case.device, "windows") == host
