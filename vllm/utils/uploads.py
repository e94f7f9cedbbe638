"""Arrays of the host on a device, without the host waiting for it."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device; on a CPU they may share memory.

    A GPU copies from pinned memory, which torch keeps until the copy was made: one from ordinary
    memory would have the host wait.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class CopyEvent(Protocol):
    """The part of ``torch.cuda.Event`` that tells when a copy was made."""

    def record(self) -> None:
        """Stand behind what was handed to the device so far."""

    def synchronize(self) -> None:
        """Wait until the device has come here; at once where nothing was recorded."""


class StagingBuffers:
    """Two buffers of the host that take turns, so that a step is laid out while the last is copied.

    A GPU copies from pinned memory when it comes to it, and the host may be several steps ahead:
    nobody waits for a step that samples nothing. So a buffer waits for its own last copy, which is
    two steps back, before it is written again.

    Args:
        shape: Of a buffer.
        dtype: Likewise.
        device: Where the copies go.
        make_event: Makes what waits for a copy; None: a GPU's own, and for other devices nothing.

    Owns: the buffers.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        make_event: Callable[[], CopyEvent] | None = None,
    ) -> None:
        is_pinned = device.type == "cuda"
        if make_event is None and is_pinned:
            make_event = torch.cuda.Event
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=is_pinned) for _ in range(2)]
        self._events = [make_event() for _ in range(2)] if make_event is not None else []
        self._turn = 0

    def take(self) -> torch.Tensor:
        """Return the buffer whose turn it is, which no copy reads any more."""
        self._turn ^= 1
        if self._events:
            self._events[self._turn].synchronize()
        return self._buffers[self._turn]

    def send(self, used: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a part of the buffer taken last, without waiting for the device.

        Mutates: target.
        """
        target.copy_(used, non_blocking=True)
        if self._events:
            self._events[self._turn].record()
