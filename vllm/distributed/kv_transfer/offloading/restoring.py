"""Which objects bring a prompt further than the pool does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.offloading.layout import ObjectLayout
from vllm.distributed.kv_transfer.offloading.orders import ObjectOrder
from vllm.v1.kv_offload.cells import ObjectKind
from vllm.v1.kv_offload.records import ObjectKey, StoredObject
from vllm.v1.kv_offload.store import ObjectStore

# Boundaries that are looked up at a time, from the deepest down.
_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Restorable:
    """A prefix that can be brought back.

    Attributes:
        position: Its tokens.
        objects: What it is made of.
        orders: The same for the workers.
        num_bytes: Their bytes, at a worker.
        next_token: The token that followed when its state was made, if known.
    """

    position: int
    objects: tuple[StoredObject, ...]
    orders: tuple[ObjectOrder, ...]
    num_bytes: int
    next_token: int | None


def find_restorable(
    store: ObjectStore,
    layout: ObjectLayout,
    block_hashes: Sequence[bytes],
    num_local: int,
    max_tokens: int,
) -> Restorable | None:
    """Return the longest prefix on the disk that is longer than the local hit; memory only.

    Args:
        store: What is there.
        layout: What objects are made of.
        block_hashes: Of the prompt, one for each unit.
        num_local: Tokens of the local hit.
        max_tokens: The longest prefix of use.
    """
    unit, size = layout.unit, layout.group_tokens
    end = min(max_tokens // unit, len(block_hashes)) * unit
    first_group = num_local // size
    rows: list[StoredObject] = []
    ends = range((first_group + 1) * size, end + 1, size)
    keys = [ObjectKey.of(ObjectKind.ROWS, block_hashes[e // unit - 1]) for e in ends]
    for position, found in zip(ends, store.find(keys), strict=True):
        if found is None or not _is_whole(layout, found, position - size, position):
            break
        rows.append(found)
    matched = (first_group + len(rows)) * size
    state = _find_state(store, layout, block_hashes, num_local, min(end, matched + size - unit))
    if state is not None:
        return _make(layout, state.position, rows[: state.position // size - first_group], state)
    if layout.has_windows or matched <= num_local:
        return None
    return _make(layout, matched, rows, None)


def _find_state(
    store: ObjectStore,
    layout: ObjectLayout,
    block_hashes: Sequence[bytes],
    num_local: int,
    end: int,
) -> StoredObject | None:
    """Return the deepest state above the local hit, and up to ``end``."""
    unit, size = layout.unit, layout.group_tokens
    places = range(end // unit * unit, num_local, -unit)
    for at in range(0, len(places), _AT_ONCE):
        part = places[at : at + _AT_ONCE]
        keys = [ObjectKey.of(ObjectKind.STATE, block_hashes[p // unit - 1]) for p in part]
        for position, found in zip(part, store.find(keys), strict=True):
            first = position // size * size
            if found is not None and _is_whole(layout, found, first, position):
                return found
    return None


def _is_whole(layout: ObjectLayout, found: StoredObject, first: int, position: int) -> bool:
    """Whether an entry is what its place in the prompt says."""
    kind = found.extent.key.kind
    expected = layout.object_bytes(kind, first, position)
    return found.position == position and found.extent.num_bytes == expected


def _make(
    layout: ObjectLayout, position: int, rows: Sequence[StoredObject], state: StoredObject | None
) -> Restorable:
    size = layout.group_tokens
    objects = (*rows, *(() if state is None else (state,)))
    orders = [ObjectOrder(found.extent, found.position - size, found.position) for found in rows]
    if state is not None:
        orders.append(ObjectOrder(state.extent, position // size * size, position))
    return Restorable(
        position,
        objects,
        tuple(orders),
        sum(found.extent.num_bytes for found in objects),
        None if state is None else state.next_token,
    )
