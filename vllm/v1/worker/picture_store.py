"""Rows of pictures on a disk, so that a picture seen before costs no tower after a restart.

    FOLDER/<digest of key and maker>.rows     mark | rows, columns | fp32 values | digest of all

The key is the scheduler's: a picture's identity (pixels, grid, tower), with who may share it in
front. The maker is whatever decides about the last bits: versions, builds, threads. So a file that
is found holds what the tower would make, bit for bit. Its digest is looked at with every read: a
file that is damaged is deleted, and the tower runs.

Several processes may use one folder. Files are written beside their places and renamed; where the
folder has grown too large, those that were not read for longest go.
"""

import os
import secrets
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.towers.parts import KeepGoing
from vllm.model_executor.towers.tower import Tower

logger = init_logger(__name__)

_MARK = b"vllm rows 1\n"
_SUFFIX = ".rows"
_SIZE_BYTES, _DIGEST_BYTES = 8, 32
# What a process left that died while it wrote.
_ABANDONED_S = 3600.0
# Down to this share, so that not every picture looks at the whole folder.
_KEPT_SHARE = 0.9
# So often a process looks at the folder while it writes as much as the folder may hold.
_LOOKS = 20


def make_folder(path: str) -> Path:
    """Return a folder for rows, made if it is not there, for its owner alone.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return Path(path)


def _unusable(path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"mm_encoder_cache_dir={str(path)!r}: {error}.")


class PictureStore:
    """Rows in a folder, bounded in bytes.

    Owns: the folder's files, together with other processes that use it.

    Args:
        folder: One that is there: see ``make_folder``.
        max_bytes: What its files may take.
        maker: Names what decides about the bits of rows.

    Raises:
        ConfigError: The folder cannot be used.
    """

    def __init__(self, folder: str | Path, max_bytes: int, maker: str) -> None:
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._maker = maker.encode()
        self._has_failed = False
        self._num_unseen = 0
        try:
            self._num_bytes = self._shrink()
        except OSError as error:
            raise _unusable(folder, error) from error

    def find(self, key: str) -> torch.Tensor | None:
        """Return the rows fp32 ``[N, D]`` of a key; None: they are not there, or damaged."""
        path = self._find_path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note_failure(error)
            return None
        rows = _parse(data, path.stem)
        if rows is None:
            logger.warning("%s is damaged: it is deleted, and its picture read anew", path)
        try:
            if rows is None:
                path.unlink(missing_ok=True)
            else:
                os.utime(path)
        except OSError as error:
            self._note_failure(error)
        return rows

    def keep(self, key: str, rows: torch.Tensor) -> None:
        """Write rows fp32 ``[N, D]``; what cannot be written is not kept."""
        path = self._find_path(key)
        data = _format(rows, path.stem)
        if len(data) > self._max_bytes:
            return
        beside = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
        try:
            # A new file of one's own, no other that a name leads to.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
                # Not synced: after a crash the digest tells what is whole.
                file.write(data)
            beside.replace(path)
            self._num_bytes += len(data)
            self._num_unseen += len(data)
            # Others write there, too, whom only a look at the folder shows.
            if max(self._num_bytes, self._num_unseen * _LOOKS) > self._max_bytes:
                self._num_bytes = self._shrink(_KEPT_SHARE)
                self._num_unseen = 0
        except OSError as error:
            self._note_failure(error)

    def _find_path(self, key: str) -> Path:
        digest = blake2b(key.encode(), key=blake2b(self._maker, digest_size=32).digest())
        return self._folder / f"{digest.hexdigest()[:64]}{_SUFFIX}"

    def _shrink(self, share: float = 1.0) -> int:
        """Deletes the longest unread files above the limit; returns the bytes of those that stay.

        Args:
            share: Of the limit that may stay, once there is more.
        """
        now, found = time.time(), []
        for entry in os.scandir(self._folder):
            try:
                stat = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    found.append((stat.st_mtime, stat.st_size, entry.path))
                elif entry.name.endswith(".tmp") and now - stat.st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)
            except FileNotFoundError:
                # Another process was quicker.
                continue
        total = sum(size for _, size, _ in found)
        if total <= self._max_bytes:
            return total
        for _, size, path in sorted(found):
            if total <= share * self._max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total

    def _note_failure(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("Rows of pictures are not kept on disk any more, or not all: %s", error)


def make_rows(
    tower: Tower, store: PictureStore | None, key: str, pixels: np.ndarray, keep_going: KeepGoing
) -> torch.Tensor:
    """Return the rows of a picture: those on disk, or else the tower's, which are kept there.

    Args:
        tower: Makes them.
        store: The disk; None: there is none.
        key: Under which they are kept.
        pixels: uint8 ``[H, W, 3]``.
        keep_going: Called between layers; raises to end the work.
    """
    found = None if store is None else store.find(key)
    if found is not None:
        return found
    rows = tower.encode(torch.from_numpy(pixels), keep_going)
    if store is not None:
        store.keep(key, rows)
    return rows


def _format(rows: torch.Tensor, name: str) -> bytes:
    sizes = b"".join(size.to_bytes(_SIZE_BYTES, "little") for size in rows.shape)
    body = _MARK + sizes + rows.float().contiguous().numpy().tobytes()
    return body + _digest(body, name)


def _parse(data: bytes, name: str) -> torch.Tensor | None:
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    head = len(_MARK) + 2 * _SIZE_BYTES
    if not body.startswith(_MARK) or len(body) < head or digest != _digest(body, name):
        return None
    count, width = (
        int.from_bytes(body[at : at + _SIZE_BYTES], "little")
        for at in range(len(_MARK), head, _SIZE_BYTES)
    )
    values = np.frombuffer(bytearray(body[head:]), np.float32)
    return torch.from_numpy(values).view(count, width)


def _digest(body: bytes, name: str) -> bytes:
    """A file that was moved to another's place is none of that place."""
    return blake2b(body, digest_size=_DIGEST_BYTES, key=name.encode()[:64]).digest()
