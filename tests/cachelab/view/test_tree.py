"""The tree of cached prefixes against the index it is drawn from, and a slow drawing of it."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cachelab.twin.recorded_run import SMALL_LLAMA, RecordedRun, make_prompt, small_settings
from vllm.cachelab.view.log import HALF_LIFE_S
from vllm.cachelab.view.sources import make_source
from vllm.cachelab.view.tree import Tree, TreeBuilder
from vllm.cachelab.view.view import CacheView
from vllm.v1.core.kv_cache_utils import BlockHash


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WatchedRun(RecordedRun):
    """Traffic whose every step is seen by a view."""

    def __init__(self, path: Path, seed: int = 0, **settings: Any) -> None:
        super().__init__(path, small_settings(**settings), seed)
        self.clock = Clock()
        self.view = CacheView(self.scheduler, self.clock)
        self.finished: list[str] = []
        # The recorder sits at the same door; the view needs the step before it is taken in.
        schedule = self.scheduler.schedule

        def watched() -> Any:
            step = schedule()
            self.view.note_step(step)
            return step

        self.scheduler.schedule = watched

    def serve(self, prompt: list[int], max_tokens: int = 1, **params: Any) -> str:
        request_id = self.add(prompt, max_tokens=max_tokens, **params)
        while self.scheduler.has_requests():
            self.step()
        return request_id

    def close(self) -> None:
        """Close the trace; nobody reads it."""
        self.scheduler.recorder._writer.close()

    def tree(self) -> Tree:
        return self.view.snapshot().tree


LLAMA = {"hf_config": SMALL_LLAMA, "interval": "none", "block_size": 16}


@pytest.fixture(params=["units", "blocks"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WatchedRun]:
    """Hits at one unit, and at whole blocks."""
    own: dict[str, Any] = LLAMA if request.param == "blocks" else {}
    with closing(WatchedRun(tmp_path / "trace", **own)) as made:
        yield made


@pytest.fixture
def unit_run(tmp_path: Path) -> Iterator[WatchedRun]:
    """Hits at one unit."""
    with closing(WatchedRun(tmp_path / "trace")) as made:
        yield made


def chains(run: WatchedRun) -> Iterator[tuple[BlockHash, ...]]:
    """Yield every cached chain from its beginning, drawn the slow way: one walk up per prefix."""
    parents = make_source(run.scheduler.kv_cache_manager).parents() or run.view._source.parents()
    for own in parents:
        chain = [own]
        while (parent := parents.get(chain[-1])) is not None:
            chain.append(parent)
        if chain[-1] in parents:
            yield tuple(reversed(chain))


def test_two_prompts_that_part_are_three_branches(run: WatchedRun) -> None:
    shared = make_prompt(0, 256)
    for seed in (1, 2):
        run.serve(shared + make_prompt(seed, 128))
    unit = run.view._source.unit
    tree = run.tree()
    assert [(b.begin, b.end, b.parent) for b in tree.branches] == [
        (0, 256, -1),
        *[(256, 384, 0)] * 2,
    ]
    assert tree.num_tokens == 256 + 2 * 128
    assert tree.num_unreachable == tree.num_hidden == 0
    stem = tree.branches[0]
    assert (stem.hits, stem.heat) == (1, 1.0)
    assert stem.idle_s == 0.0
    assert sum(stem.tiers.values()) == len(
        {
            run.view._source.block_of(chain[-1]).block_id
            for chain in chains(run)
            if len(chain) <= 256 // unit
        }
    )


def test_admissions_tell_where_hits_came_from(run: WatchedRun) -> None:
    prompt = make_prompt(0, 300)
    for _ in range(3):
        run.serve(prompt)
    seen = run.view.snapshot()
    cached = [one.cached_tokens for one in seen.admissions]
    assert cached[0] == cached[1] > 0 == cached[2]
    assert [one.sources for one in seen.admissions] == [
        {"pool": cached[0]},
        {"pool": cached[0]},
        {},
    ]
    assert seen.sources == {"pool": seen.totals["cached_tokens"]}
    assert seen.offload is None


def test_heat_halves_and_hits_stay(run: WatchedRun) -> None:
    prompt = make_prompt(0, 300)
    for _ in range(5):
        run.serve(prompt)
    run.clock.now += 2 * HALF_LIFE_S
    (only,) = run.tree().branches
    assert only.hits == 4
    assert math.isclose(only.heat, 1.0)
    assert only.idle_s == 2 * HALF_LIFE_S


def test_running_requests_hold_and_leave(run: WatchedRun) -> None:
    prompt = make_prompt(0, 300)
    run.serve(prompt)
    name = run.add(prompt + make_prompt(1, 100), max_tokens=50)
    for _ in range(4):
        run.step()
    held = [h for b in run.tree().branches for h in b.holders]
    assert [h.name for h in held] == [name.removesuffix("-0-0123abcd-0000000a")]
    assert held[0].at // run.view._source.unit == 400 // run.view._source.unit
    assert run.view.snapshot().tiers["held"] > 0
    while run.scheduler.has_requests():
        run.step()
    assert not [h for b in run.tree().branches for h in b.holders]
    assert run.view.snapshot().tiers["held"] == 0


def test_old_branches_are_left_out_first(run: WatchedRun) -> None:
    for seed in range(6):
        run.clock.now += 10
        run.serve(make_prompt(0, 64) + make_prompt(seed + 1, 96))
    builder = TreeBuilder(run.view._source, run.view.log, run.clock.now)
    tree = builder.build(4)
    assert tree.num_hidden == 3
    assert tree.branches[0].hidden == 3
    assert sorted(b.idle_s or 0.0 for b in tree.branches[1:]) == [0.0, 10.0, 20.0]
    assert {b.parent for b in tree.branches[1:]} == {0}
    assert tree.num_tokens == 64 + 6 * 96


def test_a_reset_empties_it(run: WatchedRun) -> None:
    run.serve(make_prompt(0, 200))
    assert run.tree().branches
    assert run.scheduler.reset_prefix_cache()
    snapshot = run.view.snapshot()
    assert snapshot.tree == Tree([], 0, 0, 0)
    assert snapshot.tiers == {"held": 0, "scratch": snapshot.num_blocks}


def test_checkpoints_are_ticks(unit_run: WatchedRun) -> None:
    run = unit_run
    shared = make_prompt(0, 256)
    run.serve(shared + make_prompt(1, 100))
    run.serve(shared + make_prompt(2, 100))
    run.serve(shared + make_prompt(3, 100))
    index = run.scheduler.kv_cache_manager.coordinator.index
    ticks = {t.at: t for b in run.tree().branches for t in b.ticks}
    assert set(ticks) == {record.position for record in index.checkpoints.values()}
    assert ticks[256].is_junction
    assert ticks[256].hits == 2


def test_a_kept_prefix_is_a_holder(unit_run: WatchedRun) -> None:
    run = unit_run
    name = run.serve(make_prompt(0, 256), cache_ttls={256: 60.0})
    (branch,) = run.tree().branches
    assert [(h.name, h.at, h.is_kept) for h in branch.holders] == [(name, 256, True)]
    run.scheduler.kv_cache_manager.coordinator.forget_prefix(name)
    assert not run.tree().branches[0].holders


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_draws_every_chain_of_random_traffic(seed: int, run: WatchedRun) -> None:
    """Branches, their tokens and those that lost their beginning, against walks up from each."""
    run._rng.seed(seed)
    run.run(40)
    tree = run.tree()
    unit = run.view._source.unit
    reached = set(chains(run))
    assert tree.num_tokens == len(reached) * unit
    assert tree.num_tokens + tree.num_unreachable == len(run.view._source.parents()) * unit
    ends = {len(chain) * unit for chain in reached}
    assert {b.end for b in tree.branches} <= ends
    for branch in tree.branches:
        above = tree.branches[branch.parent].end if branch.parent >= 0 else 0
        assert branch.begin == above
    totals = run.view.log.totals
    assert totals.requests == len(run.cached)
    assert totals.cached_tokens == sum(run.cached.values())
