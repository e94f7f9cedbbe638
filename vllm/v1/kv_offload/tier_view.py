"""What the tiers behind the pool hold and did, for people: parts of a snapshot of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.store.keeper import Disk
    from vllm.v1.kv_offload.store.object_store import ObjectStore
    from vllm.v1.metrics.stats import OffloadStats


class TierView(msgspec.Struct, frozen=True):
    """One tier, now. Bytes are of all workers together.

    Attributes:
        state: "ready", or what it waits for or cannot do: "opening", "reading_weights" (once, for
            their digest), "off" (it could not be opened), "read_only", "reads_paused" (too many
            failed of late), "writes_stopped" (too many failed).
        max_bytes: The limit: of all files of the folder, or of the host memory.
        used_bytes: Of slots in use.
        live_bytes: Of objects that can be found.
        objects: Those, by kind: "state" (checkpoints), "rows" (row groups).
        queries: Objects that restores asked for here.
        hits: Of those, found here.
        read_bytes: Brought back since the start.
        written_bytes: Written since the start.
    """

    state: str
    max_bytes: int
    used_bytes: int
    live_bytes: int
    objects: dict[str, int]
    queries: int
    hits: int
    read_bytes: int
    written_bytes: int


class WarmStart(msgspec.Struct, frozen=True):
    """Prefixes that a start brings back before anybody asks.

    Attributes:
        state: "off", "waiting" (for the folder), "loading" or "done".
        num_prefixes: Brought back so far.
        num_tokens: Of those.
        num_left: On their way, or waiting for their turn.
    """

    state: str
    num_prefixes: int = 0
    num_tokens: int = 0
    num_left: int = 0


class TiersView(msgspec.Struct, frozen=True):
    """All tiers behind the pool.

    Attributes:
        tiers: "host" and "disk", as far as there are such.
        stores: Objects since the start, by what became of them.
        restores: Prefixes since the start, by what became of them.
        num_corrupt: Objects whose bytes were not those that were written.
        num_loading: Prefixes on their way to the pool.
        queued_bytes: On their way to the disk.
        num_unwritten: Objects that wait to be looked at, written or acknowledged; 0: a kill now
            would cost nothing that is to be kept.
        warm_start: What the start brings back.
    """

    tiers: dict[str, TierView]
    stores: dict[str, int]
    restores: dict[str, int]
    num_corrupt: int
    num_loading: int
    queued_bytes: int
    num_unwritten: int
    warm_start: WarmStart


def view_tier(
    name: str,
    state: str,
    max_bytes: int,
    store: ObjectStore | None,
    num_workers: int,
    totals: OffloadStats,
) -> TierView:
    """Return one tier, now.

    Args:
        name: "host" or "disk".
        state: As ``TierView`` has it.
        max_bytes: Its limit.
        store: What it holds; None: it cannot be known (yet).
        num_workers: Workers, each with slots of its own.
        totals: Of both tiers since the start.
    """
    used, live = (0, 0) if store is None else (store.content.used_bytes, store.content.live_bytes)
    return TierView(
        state,
        max_bytes,
        used * num_workers,
        live * num_workers,
        {} if store is None else store.content.num_objects(),
        totals.queries.get(name, 0),
        totals.hits.get(name, 0),
        totals.read_bytes.get(name, 0),
        totals.write_bytes.get(name, 0),
    )


def find_disk_state(disk: Disk, *, is_unreadable: bool, read_only: bool) -> str:
    """Return the state of the disk, as ``TierView`` has it.

    Args:
        disk: What is seen of it.
        is_unreadable: Whether reads failed too often of late.
        read_only: Whether it was asked for that.
    """
    if disk.is_opening:
        return "reading_weights" if disk.is_digesting else "opening"
    if disk.store is None:
        return "off"
    if is_unreadable:
        return "reads_paused"
    if disk.store.state.is_writable:
        return "ready"
    return "read_only" if read_only else "writes_stopped"
