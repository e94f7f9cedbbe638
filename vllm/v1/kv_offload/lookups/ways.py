"""Which objects bring a prompt further than the pool does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.lookups.rates import Rates
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey, StoredObject

# Boundaries that are looked up at a time, from the deepest down.
_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Located:
    """An object, and which tier has it.

    Attributes:
        found: The object.
        is_host: Whether it is in host memory; else it is on the disk.
    """

    found: StoredObject
    is_host: bool


@dataclass(frozen=True, slots=True)
class Restorable:
    """A prefix that can be brought back.

    Attributes:
        position: Its tokens.
        objects: What it is made of.
        spans: Of each object, the first token whose dense rows are in it and its boundary.
        next_token: The token that followed when its state was made, if known.
    """

    position: int
    objects: tuple[Located, ...]
    spans: tuple[tuple[int, int], ...]
    next_token: int | None

    def num_bytes(self, *, is_host: bool) -> int:
        """Return the bytes that come from one tier, at a worker."""
        return sum(o.found.extent.num_bytes for o in self.objects if o.is_host == is_host)

    def count_sources(self, num_local: int) -> dict[str, int]:
        """Return the tokens beyond a local hit by the tier that they come from."""
        counts: dict[str, int] = {}
        for located, (first, end) in zip(self.objects, self.spans, strict=True):
            # A state whose rows lie in the pool brings the tokens up to it all the same.
            name = "host" if located.is_host else "disk"
            counts[name] = counts.get(name, 0) + max(0, end - max(first, num_local))
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to bring a prompt further than the pool does.

    Attributes:
        found: What is loaded.
        resumes_at: From where on tokens are computed. With rows alone that is before their end:
            window rows are computed again (``retention.rebuild``).
    """

    found: Restorable
    resumes_at: int

    @property
    def is_rows_alone(self) -> bool:
        """Whether windows are to be rebuilt."""
        return self.resumes_at < self.found.position


class Tiers:
    """Where objects are looked up: host memory first, then the disk.

    Args:
        host: Of host memory, if there is some.
        disk: Of the disk, if there is one and it is open.
    """

    def __init__(self, host: ObjectStore | None, disk: ObjectStore | None) -> None:
        self.host = host
        self.disk = disk

    def find(self, keys: Sequence[ObjectKey]) -> list[Located | None]:
        """Return the objects of some names."""
        none: list[StoredObject | None] = [None] * len(keys)
        host = none if self.host is None else self.host.find(keys)
        missing = [i for i, found in enumerate(host) if found is None]
        disk = none
        if self.disk is not None and missing:
            disk = list(none)
            found = self.disk.find([keys[i] for i in missing])
            for i, entry in zip(missing, found, strict=True):
                disk[i] = entry
        return [
            Located(near, True) if near else Located(far, False) if far else None
            for near, far in zip(host, disk, strict=True)
        ]

    def was_given_up(self, key: ObjectKey) -> bool:
        """Whether a tier had an object and gave it up for want of room."""
        return any(s is not None and s.was_given_up(key) for s in (self.host, self.disk))

    def _parts(
        self, objects: Sequence[Located]
    ) -> Iterator[tuple[ObjectStore, list[StoredObject]]]:
        for store, is_host in ((self.host, True), (self.disk, False)):
            part = [located.found for located in objects if located.is_host == is_host]
            if store is not None and part:
                yield store, part

    def pin(self, objects: Sequence[Located]) -> bool:
        """Keep objects from being given up; False, with nothing kept: one is gone."""
        pinned: list[tuple[ObjectStore, list[StoredObject]]] = []
        for store, part in self._parts(objects):
            if not store.pin(part):
                for other, done in pinned:
                    other.unpin(done)
                return False
            pinned.append((store, part))
        return True

    def unpin(self, objects: Sequence[Located]) -> None:
        """Let objects be given up again."""
        for store, part in self._parts(objects):
            store.unpin(part)


def find_ways(
    tiers: Tiers,
    layout: ObjectLayout,
    block_hashes: Sequence[bytes],
    num_local: int,
    max_tokens: int,
    rebuild_tokens: int | None = None,
) -> list[Way]:
    """Return how the tiers can bring a prompt further than the pool; memory only.

    The longest prefix that can be resumed as it is, and, where windows can be rebuilt, all rows.

    Args:
        tiers: What is there.
        layout: What objects are made of.
        block_hashes: Of the prompt, one for each unit.
        num_local: Tokens of the local hit.
        max_tokens: The longest prefix of use.
        rebuild_tokens: Tokens to compute again before the end of rows; None: that is no way.

    Raises:
        IndexUnreadError: Part of the index is not read yet.
    """
    unit, size = layout.unit, layout.group_tokens
    end = min(max_tokens // unit, len(block_hashes)) * unit
    first_group = num_local // size
    rows: list[Located] = []
    ends = range((first_group + 1) * size, end + 1, size)
    keys = [ObjectKey.of(ObjectKind.ROWS, block_hashes[e // unit - 1]) for e in ends]
    for position, found in zip(ends, tiers.find(keys), strict=True):
        if found is None or not _is_whole(layout, found, position - size, position):
            break
        rows.append(found)
    matched = (first_group + len(rows)) * size
    ways: list[Way] = []
    state = _find_state(tiers, layout, block_hashes, num_local, min(end, matched + size - unit))
    if state is not None:
        position = state.found.position
        found_whole = _make(layout, position, rows[: position // size - first_group], state)
        ways.append(Way(found_whole, position))
    elif not layout.has_windows and matched > num_local:
        ways.append(Way(_make(layout, matched, rows, None), matched))
    if layout.has_windows and rebuild_tokens is not None and rows:
        resumes_at = (matched - rebuild_tokens) // unit * unit
        if resumes_at > num_local:
            ways.append(Way(_make(layout, matched, rows, None), resumes_at))
    return ways


def find_restorable(
    tiers: Tiers,
    layout: ObjectLayout,
    block_hashes: Sequence[bytes],
    num_local: int,
    max_tokens: int,
) -> Restorable | None:
    """Return the longest prefix in the tiers that can be resumed as it is; see ``find_ways``."""
    ways = find_ways(tiers, layout, block_hashes, num_local, max_tokens)
    return ways[0].found if ways else None


def choose_way(
    ways: Sequence[Way],
    rates: Rates,
    num_local: int,
    num_tokens: int,
    num_queued: int,
    *,
    always: bool = False,
) -> Way | None:
    """Return the quickest way to compute a prompt; None: without a load.

    Args:
        ways: What can be loaded.
        rates: What was measured.
        num_local: Tokens of the local hit.
        num_tokens: Of the prompt.
        num_queued: Bytes that are read from the disk before.
        always: Load whatever it costs, the way that leaves least to compute.
    """
    best: Way | None = None
    best_s = rates.compute_s(num_local, num_tokens)
    if best_s is None or always:
        # The one that can be resumed as it is comes first.
        return max(ways, key=lambda way: way.resumes_at, default=None)
    for way in ways:
        from_disk = way.found.num_bytes(is_host=False)
        from_host = way.found.num_bytes(is_host=True)
        queued = num_queued if from_disk else 0
        cost = rates.cost_s(from_disk, way.resumes_at, num_tokens, queued, from_host)
        if cost is not None and cost < best_s:
            best, best_s = way, cost
    return best


def _find_state(
    tiers: Tiers,
    layout: ObjectLayout,
    block_hashes: Sequence[bytes],
    num_local: int,
    end: int,
) -> Located | None:
    """Return the deepest state above the local hit, and up to ``end``."""
    unit, size = layout.unit, layout.group_tokens
    places = range(end // unit * unit, num_local, -unit)
    for at in range(0, len(places), _AT_ONCE):
        part = places[at : at + _AT_ONCE]
        keys = [ObjectKey.of(ObjectKind.STATE, block_hashes[p // unit - 1]) for p in part]
        for position, found in zip(part, tiers.find(keys), strict=True):
            first = position // size * size
            if found is not None and _is_whole(layout, found, first, position):
                return found
    return None


def find_given_up(
    tiers: Tiers,
    layout: ObjectLayout,
    block_hashes: Sequence[bytes],
    start: int,
    max_tokens: int,
) -> int:
    """Return how far a prompt could resume if the tiers had not given objects up; 0: no further.

    Args:
        tiers: What is there, and what was.
        layout: What objects are made of.
        block_hashes: Of the prompt, one for each unit.
        start: Tokens that are there.
        max_tokens: The longest prefix of use.
    """
    unit, size = layout.unit, layout.group_tokens
    end = min(max_tokens // unit, len(block_hashes)) * unit
    reached = 0
    for position in range((start // size + 1) * size, end + 1, size):
        key = ObjectKey.of(ObjectKind.ROWS, block_hashes[position // unit - 1])
        if not (tiers.was_given_up(key) or tiers.find([key])[0]):
            break
        reached = position
    last = min(end, max(start // size * size, reached) + size - unit)
    for position in range(last // unit * unit, start, -unit):
        key = ObjectKey.of(ObjectKind.STATE, block_hashes[position // unit - 1])
        if tiers.was_given_up(key):
            return position
    return 0 if layout.has_windows or reached <= start else reached


def _is_whole(layout: ObjectLayout, located: Located, first: int, position: int) -> bool:
    """Whether an entry is what its place in the prompt says."""
    found = located.found
    kind = found.extent.key.kind
    expected = layout.object_bytes(kind, first, position)
    return found.position == position and found.extent.num_bytes == expected


def _make(
    layout: ObjectLayout, position: int, rows: Sequence[Located], state: Located | None
) -> Restorable:
    size = layout.group_tokens
    spans = [(located.found.position - size, located.found.position) for located in rows]
    if state is None:
        return Restorable(position, tuple(rows), tuple(spans), None)
    spans.append((position // size * size, position))
    return Restorable(position, (*rows, state), tuple(spans), state.found.next_token)
