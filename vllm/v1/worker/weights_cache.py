"""The folder in which the next start finds weights that were packed before."""

import os
from pathlib import Path

from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files
from vllm.model_executor.model_loader.packed_copies import PackedCopies
from vllm.v1.kv_offload.store.folder import WEIGHTS_FILE
from vllm.v1.kv_offload.store.weights_digest import digest_files


class WeightsCache:
    """A folder of packed weights of any number of checkpoints, made if need be.

    Copies belong to all bytes of a checkpoint's files: those are read once, and again when a file
    has changed. In a folder of another user's digests are looked up alone.

    Args:
        folder: Its path.

    Raises:
        ConfigError: It cannot be made.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder)
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_own = self._path.stat().st_uid == os.geteuid()
        except OSError as error:
            raise ConfigError(f"weights_cache_dir={folder!r}: {error}.") from error
        self._remembers = is_own and os.access(self._path, os.W_OK)

    def digest(self, checkpoint: str) -> str:
        """Return a digest of all bytes of a checkpoint's files.

        Raises:
            CheckpointError: One cannot be read.
        """
        files = find_weight_files(Path(checkpoint))
        found = digest_files(files, self._path / WEIGHTS_FILE, remembers=self._remembers)
        assert found is not None, "nobody stops it"
        return found

    def open(self, checkpoint: str, maker: str, num_threads: int) -> PackedCopies:
        """Return the packed matrices of a checkpoint.

        Args:
            checkpoint: Its file or folder.
            maker: Names how matrices are packed.
            num_threads: Threads that check the copies.
        """
        return PackedCopies(self._path, self.digest(checkpoint), maker, num_threads)
