"""Shares of the cache: whose blocks others may not take, and whose go first. Pure functions.

A *partition* is a tenant with a share of its own; all others are the common one, number 0. A block
belongs to the partition for whose request it was taken, as long as something is cached in it:

    partition   | held by requests | free, cached          |
                |<----- guaranteed ------>|                  the free ones below it stay
                |<---------- at most ------------>|          what is above goes first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.config.tenants import TenantsConfig
from vllm.exceptions import ConfigError

COMMON = 0
# Each has queues and lists of its own, as long as the pool.
MAX_PARTITIONS = 64


@dataclass(frozen=True, slots=True)
class CacheShares:
    """The partitions of a pool.

    Attributes:
        partitions: Numbers by tenant; others belong to ``COMMON``.
        guaranteed: By partition, blocks that others cannot take.
        at_most: By partition, blocks above which it gives first.
    """

    partitions: Mapping[str, int]
    guaranteed: Sequence[int]
    at_most: Sequence[int]

    @classmethod
    def of(cls, tenants: TenantsConfig, num_blocks: int) -> CacheShares | None:
        """Return the partitions of tenants in a pool; None: nobody has a share of its own.

        Raises:
            ConfigError: There are too many.
        """
        own = [t for t in tenants.tenants.values() if t.cache_guaranteed > 0 or t.cache_at_most < 1]
        if not own:
            return None
        if len(own) >= MAX_PARTITIONS:
            raise ConfigError(
                f"{len(own)} tenants have cache_guaranteed or cache_at_most: at most "
                f"{MAX_PARTITIONS - 1} may have a share of their own."
            )
        return cls(
            {tenant.name: number for number, tenant in enumerate(own, COMMON + 1)},
            (0, *(int(tenant.cache_guaranteed * num_blocks) for tenant in own)),
            (num_blocks, *(int(tenant.cache_at_most * num_blocks) for tenant in own)),
        )

    def find(self, tenant: str | None) -> int:
        """Return the partition of a request's tenant."""
        return COMMON if tenant is None else self.partitions.get(tenant, COMMON)


class Owned(NamedTuple):
    """What a partition has of the pool, in blocks: held by requests, and free but cached."""

    held: int
    free: int


def num_kept(guaranteed: int, owned: Owned) -> int:
    """Return how many of a partition's free blocks others may not take."""
    return max(0, min(owned.free, guaranteed - owned.held))


def choose_giver(shares: CacheShares, owned: Sequence[Owned], taker: int) -> int | None:
    """Return the partition that gives a cached block to another's or its own request.

    First those above their most, furthest first; then the taker, if it is at its most; then of all
    that are above what they are guaranteed, and the taker, the one furthest above.

    Args:
        shares: The partitions.
        owned: What each has.
        taker: Whose request it is.

    Returns:
        Its number; None: what is free is all kept for others.
    """
    over = {
        p: mine.held + mine.free - most
        for p, (mine, most) in enumerate(zip(owned, shares.at_most, strict=True))
        if mine.free and mine.held + mine.free > most
    }
    if over:
        return max(over, key=over.__getitem__)
    mine = owned[taker]
    if mine.free and mine.held + mine.free >= shares.at_most[taker]:
        return taker
    above = {
        p: other.held + other.free - kept
        for p, (other, kept) in enumerate(zip(owned, shares.guaranteed, strict=True))
        if other.free and (p == taker or other.held + other.free > kept)
    }
    return max(above, key=above.__getitem__) if above else None
