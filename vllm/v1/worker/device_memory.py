"""How much memory the KV pool may take: a snapshot, a profile run, and a subtraction."""

from dataclasses import dataclass
from typing import Any, Protocol

from vllm.exceptions import ConfigError

_PEAK = "allocated_bytes.all.peak"


class DeviceMemory(Protocol):
    """The part of ``torch.cuda`` or ``torch.npu`` that tells about memory."""

    def mem_get_info(self) -> tuple[int, int]:
        """Return (free, total) bytes as the driver sees them."""

    def memory_stats(self) -> dict[str, Any]:
        """Return the allocator's counters."""

    def memory_reserved(self) -> int:
        """Return the bytes that torch's allocator took from the driver."""

    def reset_peak_memory_stats(self) -> None:
        """Begin a new peak."""

    def empty_cache(self) -> None:
        """Give unused bytes back to the driver."""

    def synchronize(self) -> None:
        """Wait for the device."""


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes before anything was loaded.

    Attributes:
        free: Free on the device.
        total: The device's memory.
        reserved: Of that, what torch holds already.
    """

    free: int
    total: int
    reserved: int

    @classmethod
    def take(cls, device: DeviceMemory) -> "MemorySnapshot":
        """Read the device."""
        free, total = device.mem_get_info()
        return cls(free, total, device.memory_reserved())

    @property
    def others(self) -> int:
        """Bytes that other processes (and the driver's context) hold."""
        return self.total - self.free - self.reserved


def available_kv_bytes(
    first: MemorySnapshot, now: MemorySnapshot, peak_bytes: int, utilization: float
) -> int:
    """Return the bytes left for the KV pool.

    The share of the device that this process may take, less torch's peak (weights and the largest
    step) and less what is held outside of torch, as it was before or is now, whichever is more:
    kernels and communication allocate there too.

    Raises:
        ConfigError: Other processes hold so much that the share cannot be had.
    """
    wanted = int(first.total * utilization)
    if wanted > first.free + first.reserved:
        raise ConfigError(
            f"--gpu-memory-utilization {utilization} asks for {wanted} bytes, but {first.free} of "
            f"{first.total} were free at start: lower it, or end what else uses the device."
        )
    outside = max(first.others, now.others)
    return max(0, wanted - peak_bytes - outside)


def read_peak_bytes(device: DeviceMemory) -> int:
    """Return the most bytes that torch had allocated since the peak was reset."""
    return int(device.memory_stats().get(_PEAK, 0))
