"""The list of prefixes for the next start, as a small file beside the index."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.used_prefixes import WarmPrefix

WARM_FILE = "warm"
# Bytes of hashes in a list, so that the file stays small.
_MAX_BYTES = 180_000


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
