"""A safetensors file in memory without being in memory: mapped, and let go tensor by tensor."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from vllm.model_executor.model_loader.safetensors_header import StoredTensor

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class MappedFile:
    """Reads each tensor once, in the order of the file.

    What was read counts as this process's memory until it is released: without, loading one file
    would peak at twice its size.

    The kernel's default read-ahead is left alone: told that reads are sequential, it read a quarter
    as fast (0.2 against 0.9 to 1.2 GB/s from a disk).

    Args:
        file: The file; its header has been checked.

    Raises:
        OSError: It cannot be mapped.

    Owns: the mapping.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with file.open("rb") as opened:
            # A private mapping, as torch wants memory it could write; nobody does.
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Not closed: a tensor of an error's frame may still look into the mapping, which goes
        # with the last of them.
        del self._map

    def read(self, stored: StoredTensor) -> Tensor:
        """Return a tensor that looks into the mapping; valid until it is released.

        F4 comes as bytes of two values. What a conversion changed is undone.
        """
        if stored.undo is None:
            return self._view(stored)
        return stored.undo(*map(self._find_view, stored.sources or (stored,)))

    def _find_view(self, stored: StoredTensor) -> Tensor:
        """Returns what lies in this file, or in another part of a split one."""
        return (self if stored.file == self._file else MappedFile(stored.file))._view(stored)

    def _view(self, stored: StoredTensor) -> Tensor:
        dtype = _DTYPES[stored.dtype]
        shape = stored.shape
        if stored.dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        if not stored.num_bytes:
            return torch.empty(shape, dtype=dtype)
        if stored.offset % dtype.itemsize:
            # Some writers align nothing.
            data = bytearray(self._map[stored.offset : stored.offset + stored.num_bytes])
            return torch.frombuffer(data, dtype=dtype).view(shape)
        count = stored.num_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.offset).view(
            shape
        )

    def release(self, stored: StoredTensor) -> None:
        """Let go of the pages that lie wholly within a tensor, and of its first one."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for part in stored.sources or (stored,):
            start = part.offset // mmap.PAGESIZE * mmap.PAGESIZE
            stop = (part.offset + part.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start and part.file == self._file:
                self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def read_rows_at_random(self, stored: StoredTensor) -> Tensor:
        """Return a tensor whose rows are read now and then: each brings its own pages alone.

        The mapping lives as long as the tensor.
        """
        tensor = self.read(stored)
        if hasattr(mmap, "MADV_RANDOM"):
            start = stored.offset // mmap.PAGESIZE * mmap.PAGESIZE
            stop = stored.offset + stored.num_bytes
            self._map.madvise(mmap.MADV_RANDOM, start, stop - start)
        return tensor
