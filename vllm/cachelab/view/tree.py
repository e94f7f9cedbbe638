"""The tree of cached prefixes: a branch is a run of units that only one continuation follows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm.cachelab.view.sources import HELD, tier_name
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.values.hit import Checkpoint

if TYPE_CHECKING:
    from vllm.cachelab.view.log import CacheLog
    from vllm.cachelab.view.sources import PrefixSource

# Of a prefix's hash: enough to tell branches apart, too little to look a prefix up.
_KEY_BYTES = 5


class Tick(msgspec.Struct, frozen=True):
    """A checkpoint: where a prompt can resume.

    Attributes:
        at: Its boundary, in tokens.
        tier: Where its blocks stand.
        hits: Requests that resumed there.
        is_junction: Whether prompts were seen to part there.
    """

    at: int
    tier: str
    hits: int
    is_junction: bool


class Holder(msgspec.Struct, frozen=True):
    """A request that runs, or a kept prefix, at the deepest place of the tree that it holds."""

    name: str
    at: int
    is_kept: bool = False


class Branch(msgspec.Struct):
    """Cached units between two partings.

    Attributes:
        key: The same in every snapshot.
        parent: Number of the branch that it goes on from; -1: it begins prompts.
        begin: First token.
        end: One past the last.
        hits: Requests that resumed in it or behind it.
        heat: The same, the older the less.
        idle_s: Seconds since it, or what is behind it, was used; None: that was not seen.
        tiers: Blocks of the first dense group by where they stand.
        hidden: Branches behind it that are left out.
    """

    key: str
    parent: int
    begin: int
    end: int
    hits: int = 0
    heat: float = 0.0
    idle_s: float | None = None
    tiers: dict[str, int] = {}
    ticks: list[Tick] = []
    holders: list[Holder] = []
    hidden: int = 0


class Tree(msgspec.Struct):
    """All branches, parents before children.

    Attributes:
        num_tokens: In branches, hidden ones included.
        num_unreachable: Cached tokens whose beginning is gone.
    """

    branches: list[Branch]
    num_tokens: int
    num_unreachable: int
    num_hidden: int


class TreeBuilder:
    """Draws one tree.

    Args:
        source: What is cached.
        log: What was used of it.
        now_s: Monotonic seconds.
        kept: Names of kept prefixes by their ends.
    """

    def __init__(
        self,
        source: PrefixSource,
        log: CacheLog,
        now_s: float,
        kept: Mapping[BlockHash, str] | None = None,
    ) -> None:
        self._source, self._log, self._now_s = source, log, now_s
        self._kept = kept or {}
        self._holders: dict[BlockHash, list[str]] = {}
        for place, name in log.holders():
            self._holders.setdefault(place, []).append(name)

    def build(self, max_branches: int) -> Tree:
        """Return the tree; of too many branches those used longest ago are left out."""
        source, parents = self._source, self._source.parents()
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for own, parent in parents.items():
            children.setdefault(parent, []).append(own)
        branches: list[Branch] = []
        num_units = 0
        todo: list[tuple[BlockHash, int, int]] = [(own, -1, 0) for own in children.get(None, ())]
        while todo:
            first, parent_number, begin = todo.pop()
            run, behind = [first], children.get(first, [])
            while len(behind) == 1:
                run += behind
                behind = children.get(run[-1], [])
            number = len(branches)
            branches.append(self._draw(run, parent_number, begin))
            num_units += len(run)
            todo += [(child, number, begin + len(run)) for child in behind]
        _sum_up(branches)
        shown = _most_recent(branches, max_branches)
        return Tree(
            shown,
            num_units * source.unit,
            (len(parents) - num_units) * source.unit,
            len(branches) - len(shown),
        )

    def _draw(self, run: Sequence[BlockHash], parent: int, begin: int) -> Branch:
        """Return the branch of a run of units, ``begin`` units into the prompt."""
        unit, uses = self._source.unit, self._log.uses
        made = Branch(run[0][:_KEY_BYTES].hex(), parent, begin * unit, (begin + len(run)) * unit)
        tiers: Counter[str] = Counter()
        last: KVCacheBlock | None = None
        for at, own in enumerate(run, start=begin + 1):
            block = self._source.block_of(own)
            if block is not None and block is not last:
                tiers[tier_name(self._source.pool, block)] += 1
                last = block
            record = self._source.checkpoint(own)
            if record is not None:
                made.ticks.append(self._tick(record))
            use = uses.get(own)
            if use is not None:
                made.hits += use.hits
                made.heat += use.heat_at(self._now_s)
                idle_s = self._now_s - use.last_s
                made.idle_s = idle_s if made.idle_s is None else min(made.idle_s, idle_s)
            if own in self._holders:
                made.idle_s = 0.0
                made.holders += [Holder(name, at * unit) for name in self._holders[own]]
            if own in self._kept:
                made.holders.append(Holder(self._kept[own], at * unit, is_kept=True))
        made.tiers = dict(tiers)
        return made

    def _tick(self, record: Checkpoint) -> Tick:
        blocks = list(record.all_blocks())
        # Gone with its weakest block, so that one's tier is its own; none: dense rows are enough.
        tiers = [self._source.pool.tier_of(block) for block in blocks]
        free = [tier for tier in tiers if tier is not None]
        name = min(free).name.lower() if free else (HELD if blocks else "regular")
        is_junction = record.standing is CheckpointStanding.JUNCTION
        return Tick(record.position, name, record.num_hits, is_junction)


def _sum_up(branches: Sequence[Branch]) -> None:
    """Let every branch count what is behind it; children stand behind their parents."""
    for branch in reversed(branches):
        if branch.parent < 0:
            continue
        above = branches[branch.parent]
        above.hits += branch.hits
        above.heat += branch.heat
        if branch.idle_s is not None:
            idle_s = branch.idle_s
            above.idle_s = idle_s if above.idle_s is None else min(above.idle_s, idle_s)


def _most_recent(branches: list[Branch], limit: int) -> list[Branch]:
    """Return at most so many branches, numbered anew; parents count those that are left out."""
    if len(branches) <= limit:
        return branches
    num_children = Counter(branch.parent for branch in branches)
    never = float("inf")

    def age(number: int) -> tuple[float, int]:
        idle_s = branches[number].idle_s
        return -(never if idle_s is None else idle_s), number

    leaves = [age(number) for number in range(len(branches)) if not num_children[number]]
    heapq.heapify(leaves)
    gone: set[int] = set()
    while len(branches) - len(gone) > limit:
        _, number = heapq.heappop(leaves)
        gone.add(number)
        parent = branches[number].parent
        if parent < 0:
            continue
        branches[parent].hidden += 1 + branches[number].hidden
        num_children[parent] -= 1
        if not num_children[parent]:
            heapq.heappush(leaves, age(parent))
    kept = [number for number in range(len(branches)) if number not in gone]
    renumbered = {old: new for new, old in enumerate(kept)}
    for number in kept:
        parent = branches[number].parent
        branches[number].parent = renumbered.get(parent, -1)
    return [branches[number] for number in kept]
