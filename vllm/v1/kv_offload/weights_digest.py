"""A digest of all bytes of a checkpoint: two that differ in one byte share no row.

Reading 20 GB takes a while, so the digest of a file is remembered by all that changes when its
content does: device, inode, size, and the times of its last change.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from vllm.v1.kv_offload.file_calls import DiskFiles

_READ_BYTES = 8 << 20
# Remembered at most; the oldest go.
_MAX_FILES = 4096


def digest_files(
    paths: Sequence[Path],
    memory: Path | None = None,
    note_progress: Callable[[int, int], None] = lambda done, total: None,
    stop: threading.Event | None = None,
) -> str | None:
    """Return a digest of the names and all bytes of some files; None: it was stopped.

    Args:
        paths: The files.
        memory: Where digests are remembered between starts; None: nowhere.
        note_progress: Called with bytes read so far, and in all.
        stop: Ends the reading early.

    Raises:
        OSError: A file cannot be read.
    """
    known = _read_memory(memory)
    total = sum(path.stat().st_size for path in paths)
    done, parts = 0, []
    has_news = False
    for path in sorted(paths):
        stamp = _stamp(path)
        digest = known.get(stamp)
        if digest is None:
            found = _digest_file(path, done, total, note_progress, stop)
            if found is None:
                return None
            # Changed while it was read: neither remembered nor right, so the answer is of no use.
            digest = found if _stamp(path) == stamp else found + "-changing"
            has_news = True
        known.pop(stamp, None)
        known[stamp] = digest
        done += path.stat().st_size
        parts.append(f"{path.name}:{digest}")
    if memory is not None and has_news:
        kept = dict(list(known.items())[-_MAX_FILES:])
        kept = {stamp: value for stamp, value in kept.items() if not value.endswith("-changing")}
        DiskFiles().replace(memory, json.dumps(kept).encode())
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _digest_file(
    path: Path,
    done: int,
    total: int,
    note_progress: Callable[[int, int], None],
    stop: threading.Event | None,
) -> str | None:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if stop is not None and stop.is_set():
                return None
            digest.update(buffer[:count])
            done += count
            note_progress(done, total)
    return digest.hexdigest()


def _read_memory(path: Path | None) -> dict[str, str]:
    """Return what is remembered; nothing if that is unreadable, as another start will write it."""
    if path is None:
        return {}
    try:
        text = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(text, dict):
        return {}
    return {str(key): value for key, value in text.items() if isinstance(value, str)}
