"""A file of lines that never grows beyond its bound."""

import os
import time
from pathlib import Path

import msgspec

from vllm.cachelab.trace.events import Event, Header
from vllm.exceptions import ConfigError

# Written lines become visible to other processes this late.
_FLUSH_S = 1.0
_BUFFER_BYTES = 1 << 18
MIN_BYTES = 1 << 16


class TraceWriter:
    """Writes lines; a file that is half the bound becomes ``FILE.1``, and a new one is begun.

    Owns: the two files.

    Args:
        path: The file; what lay there, and at ``FILE.1``, is replaced.
        max_bytes: Of both files together.

    Raises:
        ConfigError: The file cannot be written, or the bound is too small.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        if max_bytes < MIN_BYTES:
            raise ConfigError(f"cache_trace_max_bytes={max_bytes} must be at least {MIN_BYTES}.")
        self.path = path
        self._max_part = max_bytes // 2
        self._encoder = msgspec.json.Encoder()
        self._num_bytes = 0
        self._last_flush = time.monotonic()
        try:
            self._old_path.unlink(missing_ok=True)
            self._file = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"cache_trace {path} cannot be written: {error.strerror}.") from error

    @property
    def _old_path(self) -> Path:
        return self.path.with_name(self.path.name + ".1")

    def write(self, line: Event | Header) -> None:
        """Append a line; it reaches the disk within a second, or when the writer is closed."""
        raw = self._encoder.encode(line)
        self._file.write(raw)
        self._file.write(b"\n")
        self._num_bytes += len(raw) + 1
        if time.monotonic() - self._last_flush >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Let other processes see what was written."""
        self._file.flush()
        self._last_flush = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether the part has reached its bound."""
        return self._num_bytes >= self._max_part

    def rotate(self) -> None:
        """Begin another part; the caller writes its header."""
        self._file.close()
        os.replace(self.path, self._old_path)
        self._file = self.path.open("wb", buffering=_BUFFER_BYTES)
        self._num_bytes = 0

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._file.close()
