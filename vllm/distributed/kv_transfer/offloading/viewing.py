"""What people see of the tiers: see ``tier_view``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.tier_view import TierView

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.offloading.keeper import Keeper
    from vllm.v1.kv_offload.store import ObjectStore
    from vllm.v1.metrics.stats import OffloadStats


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
    used, live = (0, 0) if store is None else (store.used_bytes, store.live_bytes)
    return TierView(
        state,
        max_bytes,
        used * num_workers,
        live * num_workers,
        {} if store is None else store.num_objects(),
        totals.queries.get(name, 0),
        totals.hits.get(name, 0),
        totals.read_bytes.get(name, 0),
        totals.write_bytes.get(name, 0),
    )


def find_disk_state(keeper: Keeper, *, is_unreadable: bool, read_only: bool) -> str:
    """Return the state of the disk, as ``TierView`` has it.

    Args:
        keeper: The disk's thread.
        is_unreadable: Whether reads failed too often of late.
        read_only: Whether it was asked for that.
    """
    if keeper.is_opening:
        return "reading_weights" if keeper.is_digesting else "opening"
    if keeper.store is None:
        return "off"
    if is_unreadable:
        return "reads_paused"
    if keeper.store.is_writable:
        return "ready"
    return "read_only" if read_only else "writes_stopped"
