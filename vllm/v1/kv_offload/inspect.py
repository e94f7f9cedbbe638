"""``vllm cache ls``, ``verify``, ``clear``: a folder seen from outside. Counts, no content."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from vllm.v1.kv_offload.store.file_calls import DiskFiles
from vllm.v1.kv_offload.store.folder import (
    CacheFolder,
    FolderError,
    FolderMeta,
    Identity,
    check_private,
    core_folders,
    disk_bytes,
    read_marker,
    read_meta,
    rows_path,
)
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.rows_file import CorruptObjectError, RowsFile

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
        fault: Why nothing more can be said of it; empty: nothing is wrong.
    """

    folder: str
    identity: dict[str, str]
    num_rows: int
    num_states: int
    live_bytes: int
    disk_bytes: int
    damaged_cells: int
    fault: str = ""


def run_ls(args: argparse.Namespace) -> int:
    """Print what a folder keeps; 1 if it keeps nothing.

    Raises:
        FolderError: It is not this user's, or cannot be read.
    """
    found = [_summarise(path, meta) for path, meta in _list_identities(args.folder)]
    if args.json:
        print(json.dumps([asdict(summary) for summary in found]))
    elif not found:
        _print(_NOTHING.format(args.folder))
    for summary in () if args.json else found:
        words = summary.identity
        if summary.fault:
            size = summary.disk_bytes / 2**20
            _print(f"{summary.folder}: damaged, files of {size:.1f} MiB ({summary.fault})")
            continue
        _print(
            f"{summary.folder}: {words.get('architecture', '?')}, weights "
            f"{words.get('weights', '?')[:16]}, {words.get('dtype', '?')}, block size "
            f"{words.get('block_size', '?')}\n  {summary.num_states} checkpoints and "
            f"{summary.num_rows} row groups, {summary.live_bytes / 2**20:.1f} MiB in files of "
            f"{summary.disk_bytes / 2**20:.1f} MiB"
        )
    return 0 if found else 1


def run_verify(args: argparse.Namespace) -> int:
    """Read everything a folder keeps; 1 if some is not what was written, or there is nothing.

    Raises:
        FolderError: It is not this user's, or cannot be read.
    """
    num_whole = num_damaged = 0
    identities = list(_list_identities(args.folder))
    if not identities:
        _print(_NOTHING.format(args.folder))
        return 1
    for path, meta in identities:
        try:
            store = _load(path, meta)
        except FolderError as error:
            _print(str(error))
            num_damaged += 1
            continue
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
    roots = _list_roots(args.folder)
    if not roots:
        _print(_NOTHING.format(args.folder))
        return 1
    before = disk_bytes(args.folder)
    kept: list[str] = []
    for root in roots:
        # One at a time: a core's folder locks the one around it, too.
        folder = CacheFolder(root, _ANY_BYTES)
        try:
            kept += [str(root / name) for name in folder.remove_all()]
        except OSError as error:
            raise FolderError(
                f"{root} cannot be cleared ({error}): remove what is left by hand."
            ) from error
        finally:
            folder.close()
    print(f"{(before - disk_bytes(args.folder)) / 2**20:.1f} MiB are free again.")
    if kept:
        _print(f"Left as it is, because it is no part of a prefix cache: {', '.join(kept)}")
    return 0


def _print(text: str) -> None:
    """Print text that may hold a folder's name: that need not be text."""
    print(text.encode(errors="backslashreplace").decode())


def _list_roots(folder: Path) -> list[Path]:
    """Return the cores' folders and their own; nothing if none of them is a prefix cache.

    Raises:
        FolderError: It is another user's, or cannot be read.
    """
    try:
        if not folder.is_dir():
            return []
        roots = [*core_folders(folder), folder]
        return roots if any(read_marker(root) for root in roots) else []
    except OSError as error:
        raise FolderError(
            f"{folder} cannot be read ({error}): run this as the user whose folder it is."
        ) from error


def _list_identities(root: Path) -> Iterator[tuple[Path, FolderMeta]]:
    for folder in reversed(_list_roots(root)):
        check_private(folder)
        if read_marker(folder) is None:
            continue
        for path in sorted(folder.iterdir()):
            meta = read_meta(path) if path.is_dir() else None
            if meta is not None:
                yield path, meta


def _count_workers(path: Path) -> int:
    names = (entry.name.removeprefix("rows.") for entry in path.glob("rows.*"))
    return sum(name.isascii() and name.isdecimal() for name in names)


def _load(path: Path, meta: FolderMeta) -> ObjectStore:
    """Open a store to look at it, whether or not a server writes to it.

    Raises:
        FolderError: Its files are not there, or cannot be read.
    """
    num_workers = _count_workers(path)
    if not num_workers:
        raise FolderError(f"The prefix cache at {path} cannot be opened: it has no rows.")
    folder = CacheFolder(path.parent, _ANY_BYTES, read_only=True)
    try:
        store = folder.open_store(Identity(meta.identity, num_workers, [1]))
        store.opening.load()
        return store
    except OSError as error:
        raise FolderError(f"The prefix cache at {path} cannot be read ({error}).") from error
    finally:
        folder.close()


def _summarise(path: Path, meta: FolderMeta) -> IdentitySummary:
    try:
        store = _load(path, meta)
    except FolderError as error:
        fault = str(error).removesuffix(".")
        return IdentitySummary(str(path), meta.identity, 0, 0, 0, disk_bytes(path), 0, fault)
    counts = store.content.num_objects()
    return IdentitySummary(
        str(path),
        meta.identity,
        counts["rows"],
        counts["state"],
        store.content.live_bytes,
        disk_bytes(path),
        store.counts.damaged_cells,
    )


def _read_all(path: Path, meta: FolderMeta, store: ObjectStore, worker: int) -> Iterator[bool]:
    files = DiskFiles()
    handle = files.open(rows_path(path, worker), writable=False)
    try:
        rows = RowsFile(files, handle, meta.slot_bytes)
        for entry in store.content.list_objects():
            try:
                rows.read(entry.extent)
            except (CorruptObjectError, OSError):
                yield False
            else:
                yield True
    finally:
        files.close(handle)
