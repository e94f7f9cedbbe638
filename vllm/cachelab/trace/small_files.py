"""The tier's small files, as a record has them: with hashes cut like all others."""

from __future__ import annotations

from vllm.cachelab.trace.events import HASH_BYTES
from vllm.v1.kv_offload.restores.warm_file import WARM_FILE, cut_hashes


def write_small(name: str, data: bytes) -> str:
    """Return the text of a small file; nothing of a list of prefixes that is damaged.

    Args:
        name: Of the file.
        data: What it holds.
    """
    if name != WARM_FILE:
        return data.decode(errors="replace")
    try:
        return cut_hashes(data, HASH_BYTES).decode()
    except (KeyError, TypeError, ValueError):
        return ""
