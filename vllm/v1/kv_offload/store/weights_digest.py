"""A digest of all bytes of a checkpoint: two that differ in one byte share no row.

Reading 20 GB takes a while, so the digest of a file is remembered by all that changes when its
content does: device, inode, size, and the times of its last change.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from vllm.exceptions import CheckpointError
from vllm.logger import init_logger
from vllm.v1.kv_offload.store.file_calls import DiskFiles

logger = init_logger(__name__)

_READ_BYTES = 8 << 20
# Remembered at most; the oldest go.
_MAX_FILES = 4096
# Held by who reads weights, beside what is remembered of them.
WEIGHTS_LOCK = "weights.lock"
_TURN_POLL_S = 0.02


def digest_files(
    paths: Sequence[Path],
    memory: Path | None = None,
    note_progress: Callable[[int, int], None] = lambda done, total: None,
    stop: threading.Event | None = None,
    *,
    remembers: bool = True,
) -> str | None:
    """Return a digest of the names and all bytes of some files; None: it was stopped.

    Engine cores that share the memory take turns: the first one reads, the others find what it
    remembered. Where nothing can be remembered (a full disk, another user's lock) a warning says
    so, and the files are read all the same.

    Args:
        paths: The files.
        memory: Where digests are remembered between starts; None: nowhere.
        note_progress: Called with bytes read so far, and in all.
        stop: Ends the reading early.
        remembers: Whether the memory may be written.

    Raises:
        CheckpointError: A file cannot be read.
    """
    if memory is None or not remembers:
        return _digest(paths, _read_memory(memory), None, note_progress, stop)
    try:
        turn = _take_turn(memory.with_name(WEIGHTS_LOCK), stop)
    except OSError as error:
        _warn_forgotten(memory, error)
        return _digest(paths, _read_memory(memory), None, note_progress, stop)
    if turn is None:
        return None
    try:
        return _digest(paths, _read_memory(memory), memory, note_progress, stop)
    finally:
        os.close(turn)


def _take_turn(lock: Path, stop: threading.Event | None) -> int | None:
    """Return the handle of a lock, held until it is closed; None: it was stopped meanwhile.

    Raises:
        OSError: It can be neither opened nor locked.
    """
    handle = DiskFiles().open(lock)
    stop = stop or threading.Event()
    try:
        while not (has_turn := _try_lock(handle)) and not stop.wait(_TURN_POLL_S):
            pass
    except OSError:
        os.close(handle)
        raise
    if has_turn:
        return handle
    os.close(handle)
    return None


def _warn_forgotten(memory: Path, error: OSError) -> None:
    logger.warning(
        "The digest of the weights cannot be remembered in %s (%s): the next start reads them "
        "again",
        memory,
        error,
    )


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _digest(
    paths: Sequence[Path],
    known: dict[str, str],
    memory: Path | None,
    note_progress: Callable[[int, int], None],
    stop: threading.Event | None,
) -> str | None:
    try:
        return _digest_all(paths, known, memory, note_progress, stop)
    except OSError as error:
        where = error.filename or ", ".join(str(path) for path in paths)
        raise CheckpointError(f"{where} cannot be read for a digest: {error.strerror}.") from error


def _digest_all(
    paths: Sequence[Path],
    known: dict[str, str],
    memory: Path | None,
    note_progress: Callable[[int, int], None],
    stop: threading.Event | None,
) -> str | None:
    total = sum(path.stat().st_size for path in paths)
    done, parts = 0, []
    has_news = False

    def remember() -> None:
        if memory is not None and has_news:
            kept = dict(list(known.items())[-_MAX_FILES:])
            kept = {stamp: said for stamp, said in kept.items() if not said.endswith("-changing")}
            try:
                DiskFiles().replace(memory, json.dumps(kept).encode())
            except OSError as error:
                _warn_forgotten(memory, error)

    for path in sorted(paths):
        stamp = _stamp(path)
        digest = known.get(stamp)
        if digest is None:
            found = _digest_file(path, done, total, note_progress, stop)
            if found is None:
                # The next start goes on behind the files that were read.
                remember()
                return None
            # Changed while it was read: neither remembered nor right, so the answer is of no use.
            digest = found if _stamp(path) == stamp else found + "-changing"
            has_news = True
        known.pop(stamp, None)
        known[stamp] = digest
        done += path.stat().st_size
        parts.append(f"{path.name}:{digest}")
    remember()
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
