"""Which prefixes a next start brings back before anybody asks: names of prefixes, no content."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Prefixes that are followed; the least used go.
_MAX_FOLLOWED = 64
# What each further request takes from the weight of all: recent use counts for more.
_DECAY = 0.98
# Of one prefix; beyond that its beginning alone is brought back.
_MAX_HASHES = 4096
# Bytes of hashes in a list, so that the file stays small.
_MAX_BYTES = 180_000


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


def dump_prefixes(prefixes: Sequence[WarmPrefix], now: float) -> bytes:
    """Write prefixes down.

    Args:
        prefixes: The most wanted first; those that are too many are left out.
        now: Unix time.
    """
    entries: list[dict[str, Any]] = []
    num_bytes = 0
    for prefix in prefixes:
        data = b"".join(prefix.hashes)
        num_bytes += len(data)
        if num_bytes > _MAX_BYTES:
            break
        entry: dict[str, Any] = {
            "hashes": base64.b64encode(data).decode(),
            "units": len(prefix.hashes),
        }
        if prefix.name is None:
            entry["weight"] = prefix.weight
        else:
            entry["name"] = prefix.name
            if prefix.seconds != math.inf:
                entry |= {"seconds": prefix.seconds, "until": now + prefix.seconds}
        entries.append(entry)
    return json.dumps(entries).encode()


def load_prefixes(data: bytes, now: float) -> list[WarmPrefix]:
    """Read what ``dump_prefixes`` wrote; entries that are wrong, or whose time is over, are not.

    Args:
        data: What it wrote.
        now: Unix time; if it went back meanwhile, nothing is kept for longer than was asked.
    """
    try:
        entries = json.loads(data)
    except ValueError:
        return []
    found = (_load(entry, now) for entry in (entries if isinstance(entries, list) else ()))
    return [prefix for prefix in found if prefix is not None]


def cut_hashes(data: bytes, size: int) -> bytes:
    """Return what ``dump_prefixes`` wrote with the first bytes of hashes only.

    Raises:
        ValueError: It is not what that wrote.
        KeyError: The same.
    """
    entries = json.loads(data)
    for entry in entries:
        joined = base64.b64decode(entry["hashes"], validate=True)
        whole = len(joined) // entry["units"]
        cut = (joined[at : at + size] for at in range(0, len(joined), whole))
        entry["hashes"] = base64.b64encode(b"".join(cut)).decode()
    return json.dumps(entries).encode()


def _load(entry: Any, now: float) -> WarmPrefix | None:
    try:
        joined = base64.b64decode(entry["hashes"], validate=True)
        size, rest = divmod(len(joined), entry["units"])
        if rest or not size:
            return None
        hashes = [joined[at : at + size] for at in range(0, len(joined), size)]
        name = entry.get("name")
        if name is None:
            return WarmPrefix(hashes, float(entry["weight"]))
        seconds = math.inf
        if "until" in entry:
            seconds = min(float(entry["until"]) - now, float(entry["seconds"]))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return WarmPrefix(hashes, math.inf, str(name), seconds) if seconds > 0 else None
