"""Which replica caches which prefix, as the replicas' own events tell it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vllm.v1.engine.data_parallel.policy import Counts, Flags
from vllm.v1.engine.data_parallel.resume_places import ResumePlaces
from vllm.v1.engine.wire import CoreStatus, KVCacheInfo

# Tables of one group: small ones grow and are cleaned without a pause. A prime, since what hashes
# end with need not be spread evenly (ids of traces are not).
_NUM_SHARDS = 251
# Holders of a prefix up to which going through them beats unpacking all bits.
_FEW = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How the groups of a cache tell what they hold.

    Attributes:
        unit: Tokens under one prefix hash.
        steps: Per group, tokens between two of its hashes; 0: it tells where a prompt can resume.
        rebuild_tokens: Tokens to compute for exact window rows where only dense rows are cached;
            None: that is not done.
    """

    unit: int
    steps: tuple[int, ...]
    rebuild_tokens: int | None = None

    @classmethod
    def from_info(cls, info: KVCacheInfo) -> "CacheShape":
        """Take it from what a core says of its cache."""
        steps = tuple(group.event_step for group in info.groups)
        return cls(info.unit, steps, info.rebuild_tokens)


# Prefix -> the slots that hold it, one bit each; of one group, in shards.
_Shards = list[dict[int, int]]


class PrefixDirectory:
    """Prefix -> the replicas that hold it.

    A prompt's dense rows are cached from its start: a replica that has a unit has those before it,
    but for *holes*, which it names. So a lookup halves its way to where each replica's rows end:
    its steps grow with the logarithm of the prompt. Forgetting a replica takes no time: its bit is
    retired, another one stands for it from then on, and the entries lose the old one a table at a
    time while updates come.

    Not thread-safe. Takes about 130 bytes a prefix and group, whatever the number of replicas.

    Owns: the entries, which bit stands for which replica, the holes.

    Args:
        shape: Of every replica's cache.
        num_replicas: How many there are.
        max_entries: Bound on memory; prefixes that come when it is full are not entered.
    """

    def __init__(self, shape: CacheShape, num_replicas: int, max_entries: int = 16_000_000) -> None:
        self._shape = shape
        self._max_entries = max_entries
        # A replica tells of checkpoints under one of their groups, whichever it met first. They are
        # few beside dense rows: one table.
        self._resume = ResumePlaces() if 0 in shape.steps else None
        self._tables: list[_Shards] = [
            [{} for _ in range(_NUM_SHARDS)]
            if step or self._resume is None
            else [self._resume] * _NUM_SHARDS
            for step in shape.steps
        ]
        self._dense = [
            (table, max(1, step // shape.unit))
            for table, step in zip(self._tables, shape.steps, strict=True)
            if step
        ]
        self._num_entries = 0
        # Replica -> bit. Bits of forgotten replicas wait for a sweep before they are used again.
        self._slots = np.arange(num_replicas, dtype=np.int64)
        self._num_slots = num_replicas
        # One number for each: entries of one holder, which are most, share it.
        self._bits = [1 << slot for slot in range(num_replicas)]
        # Whether replicas have the bits of their ranks, as long as none was forgotten.
        self._is_in_order = True
        self._free_slots: list[int] = []
        self._retired = 0
        self._sweeping = 0
        self._unswept: list[dict[int, int]] = []
        self._holes: dict[int, frozenset[int]] = {}
        self._live = (1 << num_replicas) - 1

    @property
    def num_entries(self) -> int:
        """Prefixes of all groups, those of forgotten replicas too until they are swept."""
        return self._num_entries

    # ---- what replicas say -------------------------------------------------------------------

    def add_replica(self) -> int:
        """Make room for one more, and return its rank."""
        self._slots = np.append(self._slots, 0)
        rank = len(self._slots) - 1
        self._give_slot(rank)
        return rank

    def apply(self, rank: int, changes: CoreStatus) -> None:
        """Take in what a replica says."""
        if changes.is_cleared:
            self.drop(rank)
        bit = self._bits[self._slots[rank]]
        if changes.holes is not None:
            self._note_holes(rank, changes.holes)
        for group_id, hashes in changes.removed.items():
            self._remove(self._tables[group_id], hashes, bit)
        for group_id, hashes in changes.stored.items():
            self._store(self._tables[group_id], hashes, bit)
        if self._retired:
            self.sweep()

    def _store(self, shards: _Shards, hashes: Iterable[int], bit: int) -> None:
        for short in hashes:
            shard = shards[short % _NUM_SHARDS]
            known = shard.get(short)
            if known is not None:
                shard[short] = known | bit
            elif self._num_entries < self._max_entries:
                shard[short] = bit
                self._num_entries += 1

    def _remove(self, shards: _Shards, hashes: Iterable[int], bit: int) -> None:
        for short in hashes:
            shard = shards[short % _NUM_SHARDS]
            known = shard.get(short)
            if known is None:
                continue
            left = known & ~bit
            if left:
                shard[short] = left
            else:
                del shard[short]
                self._num_entries -= 1

    def _note_holes(self, rank: int, holes: Sequence[int]) -> None:
        if holes:
            self._holes[rank] = frozenset(holes)
        else:
            self._holes.pop(rank, None)

    def drop(self, rank: int) -> None:
        """Forget everything of a replica. Cost: O(1) now, the rest little by little."""
        bit = self._bits[self._slots[rank]]
        self._retired |= bit
        self._live &= ~bit
        self._holes.pop(rank, None)
        self._give_slot(rank)

    def _give_slot(self, rank: int) -> None:
        if not self._free_slots:
            self._free_slots.append(self._num_slots)
            self._bits.append(1 << self._num_slots)
            self._num_slots += 1
        slot = self._free_slots.pop()
        self._slots[rank] = slot
        self._is_in_order &= slot == rank and len(self._slots) == self._num_slots
        self._live |= 1 << slot

    def sweep(self) -> None:
        """Clean one shard of every group of forgotten replicas' bits."""
        if not self._retired:
            return
        if not self._unswept:
            # Those that are forgotten from now on wait for the next round.
            self._sweeping = self._retired
            tables = [table for table, _ in self._dense]
            self._unswept = [table[number] for table in tables for number in range(_NUM_SHARDS)]
            if self._resume is not None:
                self._unswept.append(self._resume)
        gone = self._sweeping
        for _ in self._dense or (None,):
            if self._unswept:
                self._clean(self._unswept.pop(), gone)
        if not self._unswept:
            self._free_slots += _bits(gone)
            self._retired &= ~gone

    def _clean(self, shard: dict[int, int], gone: int) -> None:
        touched = [(short, known & ~gone) for short, known in shard.items() if known & gone]
        for short, left in touched:
            if left:
                shard[short] = left
            else:
                del shard[short]
                self._num_entries -= 1

    # ---- lookups -----------------------------------------------------------------------------

    def find_cached_tokens(self, hashes: Sequence[int], num_prompt_tokens: int) -> Counts:
        """Return, per replica, how many tokens of a prompt need not be computed there.

        Args:
            hashes: Of the prompt's units, 64 bits each, in order.
            num_prompt_tokens: Of the prompt; the last one is always computed.

        Returns:
            The deepest resumable boundary whose dense rows are all there; where window rows can be
            computed again, the boundary of the dense rows less that work, if it is more.
        """
        unit = self._shape.unit
        limit = min(len(hashes), (num_prompt_tokens - 1) // unit)
        by_slot = spread(self._find(hashes, limit), self._num_slots)
        if self._is_in_order:
            return by_slot
        tokens: Counts = by_slot[self._slots]
        return tokens

    def holds_rows(self, rank: int, hashes: Sequence[int], num_units: int) -> bool:
        """Whether a replica has the dense rows of a prompt's leading units, but for holes."""
        bit = self._bits[self._slots[rank]]
        return bool(self._dense and self._holders(hashes, num_units, bit))

    def _find(self, hashes: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Return tokens and who has so many cached; nobody stands in two."""
        unit = self._shape.unit
        matched = self._match_dense(hashes, limit)
        if self._resume is None:
            return [(units * unit, mask) for units, mask in matched]
        return self._match_resume(self._resume, hashes, matched)

    def _match_dense(self, hashes: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Return leading units that all dense groups have, deepest first, and who has so many."""
        if not self._dense:
            return [(limit, self._live)] if limit else []
        everybody = self._live
        found: dict[int, int] = {}
        first = self._holders(hashes, 1, everybody) if limit else 0
        if not first:
            return []
        for rank, holes in self._holes.items():
            bit = self._bits[self._slots[rank]]
            if first & bit and not holes.isdisjoint(hashes):
                # Alone: what lies behind a hole must not mislead the search.
                end = next(i for i, short in enumerate(hashes) if short in holes)
                units = self._match_one(hashes, min(limit, end), bit)
                found[units] = found.get(units, 0) | bit
                first &= ~bit
        # By the finest group first; the others seldom end before it.
        ends = [(limit, 1, first)]
        for table in self._dense:
            ends = self._find_ends(table, hashes, ends)
        for units, _, mask in ends:
            found[units] = found.get(units, 0) | mask
        found.pop(0, None)
        return sorted(found.items(), reverse=True)

    def _find_ends(
        self, table: tuple[_Shards, int], hashes: Sequence[int], ways: list[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]:
        """Find where a group's rows end.

        Args:
            table: The group's.
            hashes: Of a prompt.
            ways: (end, start, mask): those in the mask reach start, and end by other groups.

        Returns:
            The same, each with the end that the group has too; nobody stands in two.
        """
        shards, stride = table
        found: list[tuple[int, int, int]] = []
        for way_end, way_start, everybody in ways:
            beyond = everybody
            if last := way_end - way_end % stride:
                short = hashes[last - 1]
                beyond &= shards[short % _NUM_SHARDS].get(short, 0)
            if beyond:
                found.append((way_end, way_start, beyond))
            # All of ``there`` reach ``low``, none reaches ``high``.
            todo = [(everybody ^ beyond, way_start, way_end)] if everybody != beyond else []
            while todo:
                there, low, high = todo.pop()
                while high - low > 1:
                    middle = (low + high) // 2
                    half = there
                    if last := middle - middle % stride:
                        short = hashes[last - 1]
                        half &= shards[short % _NUM_SHARDS].get(short, 0)
                    # Most often all go the same way: they end with a common beginning.
                    if not half:
                        high = middle
                        continue
                    if half != there:
                        todo.append((there ^ half, low, middle))
                        there = half
                    low = middle
                found.append((low, way_start, there))
        return found

    def _match_one(self, hashes: Sequence[int], limit: int, bit: int) -> int:
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self._holders(hashes, middle, bit):
                low = middle
            else:
                high = middle - 1
        return low

    def _holders(self, hashes: Sequence[int], units: int, among: int) -> int:
        """Return who has a prompt's leading units, if there are no holes."""
        for shards, stride in self._dense:
            last = units - units % stride
            if last:
                short = hashes[last - 1]
                among &= shards[short % _NUM_SHARDS].get(short, 0)
                if not among:
                    break
        return among

    def _match_resume(
        self, resume: ResumePlaces, hashes: Sequence[int], matched: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return how many tokens can be resumed behind, and who can."""
        unit, span = self._shape.unit, self._shape.rebuild_tokens
        found: list[tuple[int, int]] = []
        looking: list[tuple[int, int]] = []
        for number, (units, mask) in enumerate(matched):
            # Where window rows can be computed again, a place further back is worth less than that.
            # They begin at a unit.
            rebuilt = 0 if span is None else max(0, units * unit - span) // unit * unit
            looking.append((rebuilt, mask))
            floor = matched[number + 1][0] if number + 1 < len(matched) else 0
            looking = self._walk_back(resume, hashes, (units, floor), looking, found)
        return found + looking

    def _walk_back(
        self,
        resume: ResumePlaces,
        hashes: Sequence[int],
        way: tuple[int, int],
        looking: list[tuple[int, int]],
        found: list[tuple[int, int]],
    ) -> list[tuple[int, int]]:
        """Look for places to resume, from the first unit of ``way`` down to above the second;
        returns who found none yet, and what he has without one."""
        unit = self._shape.unit
        # Behind these a place is worth less than what everybody has without one.
        low = max(way[1], min(rebuilt for rebuilt, _ in looking) // unit)
        if low >= way[0]:
            return looking
        for i in resume.find(hashes, low, way[0]):
            here, rest = resume[hashes[i - 1]], []
            for rebuilt, mask in looking:
                if mask & here:
                    found.append((max(rebuilt, i * unit), mask & here))
                if mask & ~here:
                    rest.append((rebuilt, mask & ~here))
            looking = rest
            if not looking:
                break
        return looking


def spread(found: Sequence[tuple[int, int]], num_slots: int) -> Counts:
    """Return, per slot, the value of the mask that it stands in; 0: it stands in none.

    Args:
        found: (value, mask); no bit stands in two.
        num_slots: How many bits there are.
    """
    if len(found) == 0:
        return np.zeros(num_slots, np.int64)
    most, many = max(found, key=lambda item: item[1].bit_count())
    if 2 * many.bit_count() <= num_slots:
        most = many = 0
    # Nearly all have a common beginning, and nothing else: they are filled at once.
    by_slot: Counts = np.zeros(num_slots, np.int64)
    if most:
        by_slot.fill(most)
    rest = ((1 << num_slots) - 1) ^ many if many else 0
    for value, mask in found:
        if mask != many:
            fill_bits(by_slot, mask, value)
            rest &= ~mask
    if rest:
        fill_bits(by_slot, rest, 0)
    return by_slot


def fill_bits(by_slot: Counts, mask: int, value: int) -> None:
    """Set the entries of a mask's bits."""
    if mask.bit_count() <= _FEW:
        while mask:
            low = mask & -mask
            by_slot[low.bit_length() - 1] = value
            mask ^= low
        return
    # A tenth of the time of an assignment by bits.
    np.putmask(by_slot, _unpack(mask, len(by_slot)), value)


@lru_cache(256)
def _unpack(mask: int, size: int) -> Flags:
    """Return a mask's bits; those who hold what many begin with are asked for again and again."""
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits
