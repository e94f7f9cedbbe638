"""Which prefixes were used most of late, and which somebody asked to keep: names, no content."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Prefixes that are followed; the least used go.
_MAX_FOLLOWED = 64
# What each further request takes from the weight of all: recent use counts for more.
_DECAY = 0.98
# Of one prefix; beyond that its beginning alone is brought back.
_MAX_HASHES = 4096


@dataclass(slots=True)
class WarmPrefix:
    """A prefix worth bringing back.

    Attributes:
        hashes: Of its units, from the first on.
        weight: How much it was used of late.
        name: Under which somebody asked to keep it; None: nobody did.
        seconds: How long it shall be kept yet; infinity: until it is let go.
    """

    hashes: list[bytes]
    weight: float = 1.0
    name: str | None = None
    seconds: float = math.inf

    def continues(self, other: WarmPrefix) -> bool:
        """Whether the other is a beginning of this one."""
        last = len(other.hashes)
        return last <= len(self.hashes) and self.hashes[last - 1] == other.hashes[-1]


class WarmList:
    """The prefixes that were used most of late, and those that somebody asked to keep.

    Owns: both.

    Args:
        most: Prefixes to follow; the least used go.
    """

    def __init__(self, most: int = _MAX_FOLLOWED) -> None:
        self._most = most
        self._followed: list[WarmPrefix] = []
        self._named: dict[str, list[bytes]] = {}
        self.has_news = False

    def note_use(self, hashes: Sequence[bytes]) -> None:
        """Take note of a prompt with its answer; what it continues is no prefix of its own."""
        if not hashes:
            return
        made = WarmPrefix(list(hashes[:_MAX_HASHES]))
        kept = []
        for old in self._followed:
            old.weight *= _DECAY
            if made.continues(old):
                made.weight += old.weight
            elif old.continues(made):
                # Asked again, from the same or a shorter beginning.
                made = WarmPrefix(old.hashes, old.weight + 1)
            else:
                kept.append(old)
        kept.append(made)
        kept.sort(key=lambda prefix: -prefix.weight)
        self._followed = kept[: self._most]
        self.has_news = True

    def note_request(self, request: Request, unit: int) -> int:
        """Take note of a request that ended, unless it leaves the cache alone, or spare prefixes.

        Args:
            request: The request.
            unit: Tokens under one hash.

        Returns:
            The units of it that were noted.
        """
        leaves_little = request.skip_cache_insert or request.is_spare
        if request.skip_reading_prefix_cache or leaves_little:
            return 0
        num_units = min(request.num_settled_tokens // unit, len(request.block_hashes))
        self.note_use(request.block_hashes[:num_units])
        return num_units

    def note_name(self, name: str, hashes: Sequence[bytes]) -> None:
        """Take note of a prefix that somebody asked to keep."""
        if hashes:
            self._named[name] = list(hashes[:_MAX_HASHES])
            self.has_news = True

    @property
    def names(self) -> Set[str]:
        """Names of the prefixes that were kept when it was last asked what to bring back."""
        return self._named.keys()

    def choose(self, held: dict[str, float], most: int) -> list[WarmPrefix]:
        """Return what to bring back, the most wanted first.

        Args:
            held: Names of prefixes that are kept now, and for how many seconds yet.
            most: Prefixes without a name.
        """
        self._named = {name: hashes for name, hashes in self._named.items() if name in held}
        chosen = [
            WarmPrefix(hashes, math.inf, name, held[name]) for name, hashes in self._named.items()
        ]
        return chosen + self._followed[:most]

    def forget(self) -> None:
        """Forget all."""
        self._followed.clear()
        self._named.clear()
