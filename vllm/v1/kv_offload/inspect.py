"""``vllm cache ls``, ``verify``, ``clear``: a folder seen from outside. Counts, no content."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from vllm.v1.kv_offload.file_calls import DiskFiles
from vllm.v1.kv_offload.folder import (
    CacheFolder,
    FolderMeta,
    Identity,
    core_folders,
    disk_bytes,
    read_marker,
    read_meta,
    rows_path,
)
from vllm.v1.kv_offload.rows_file import CorruptObjectError, RowsFile
from vllm.v1.kv_offload.store import ObjectStore

# Nothing is written, so nothing has to fit.
_ANY_BYTES = 1 << 62
_NOTHING = "There is no prefix cache in {}."


@dataclass(frozen=True, slots=True)
class IdentitySummary:
    """What is kept of one engine.

    Attributes:
        folder: Where.
        identity: What its rows depend on, in words.
        num_rows: Row groups.
        num_states: Checkpoints.
        live_bytes: Bytes of both.
        disk_bytes: Bytes of its files.
        damaged_cells: Entries that are not whole.
    """

    folder: str
    identity: dict[str, str]
    num_rows: int
    num_states: int
    live_bytes: int
    disk_bytes: int
    damaged_cells: int


def run_ls(args: argparse.Namespace) -> int:
    """Print what a folder keeps; 1 if it keeps nothing."""
    found = [_summarise(path, meta) for path, meta in _list_identities(args.folder)]
    if args.json:
        print(json.dumps([asdict(summary) for summary in found]))
    elif not found:
        print(_NOTHING.format(args.folder))
    for summary in () if args.json else found:
        words = summary.identity
        print(
            f"{summary.folder}: {words.get('architecture', '?')}, weights "
            f"{words.get('weights', '?')[:16]}, {words.get('dtype', '?')}, block size "
            f"{words.get('block_size', '?')}\n  {summary.num_states} checkpoints and "
            f"{summary.num_rows} row groups, {summary.live_bytes / 2**20:.1f} MiB in files of "
            f"{summary.disk_bytes / 2**20:.1f} MiB"
        )
    return 0 if found else 1


def run_verify(args: argparse.Namespace) -> int:
    """Read everything a folder keeps; 1 if some is not what was written, or there is nothing."""
    num_whole = num_damaged = 0
    identities = list(_list_identities(args.folder))
    if not identities:
        print(_NOTHING.format(args.folder))
        return 1
    for path, meta in identities:
        store = _load(path, meta)
        num_damaged += store.counts.damaged_cells
        for worker in range(_count_workers(path)):
            for is_whole in tqdm(_read_all(path, meta, store, worker), unit=" objects"):
                num_whole += is_whole
                num_damaged += not is_whole
    print(f"{num_whole} objects are whole, {num_damaged} are damaged.")
    return 1 if num_damaged else 0


def run_clear(args: argparse.Namespace) -> int:
    """Remove everything a folder keeps, its hash root too; needs that no server uses it.

    Raises:
        FolderBusyError: A server does.
        FolderError: It is no prefix cache, or not this user's.
    """
    roots = [*core_folders(args.folder), args.folder]
    if not any(read_marker(root) for root in roots if root.is_dir()):
        print(_NOTHING.format(args.folder))
        return 1
    freed = disk_bytes(args.folder)
    for root in roots:
        # One at a time: a core's folder locks the one around it, too.
        folder = CacheFolder(root, _ANY_BYTES)
        folder.remove_all()
        folder.close()
    print(f"{freed / 2**20:.1f} MiB are free again.")
    return 0


def _list_identities(root: Path) -> Iterator[tuple[Path, FolderMeta]]:
    for folder in (root, *core_folders(root)):
        if not folder.is_dir() or read_marker(folder) is None:
            continue
        for path in sorted(folder.iterdir()):
            meta = read_meta(path) if path.is_dir() else None
            if meta is not None:
                yield path, meta


def _count_workers(path: Path) -> int:
    return sum(entry.name.startswith("rows.") for entry in path.iterdir())


def _load(path: Path, meta: FolderMeta) -> ObjectStore:
    """Open a store to look at it, whether or not a server writes to it."""
    folder = CacheFolder(path.parent, _ANY_BYTES, read_only=True)
    try:
        identity = Identity(meta.identity, _count_workers(path), [1])
        store = folder.open_store(identity)
        store.load()
        return store
    finally:
        folder.close()


def _summarise(path: Path, meta: FolderMeta) -> IdentitySummary:
    store = _load(path, meta)
    counts = store.num_objects()
    return IdentitySummary(
        str(path),
        meta.identity,
        counts["rows"],
        counts["state"],
        store.live_bytes,
        disk_bytes(path),
        store.counts.damaged_cells,
    )


def _read_all(path: Path, meta: FolderMeta, store: ObjectStore, worker: int) -> Iterator[bool]:
    files = DiskFiles()
    handle = files.open(rows_path(path, worker), writable=False)
    try:
        rows = RowsFile(files, handle, meta.slot_bytes)
        for entry in store.list_objects():
            try:
                rows.read(entry.extent)
            except (CorruptObjectError, OSError):
                yield False
            else:
                yield True
    finally:
        files.close(handle)
