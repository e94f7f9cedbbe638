"""How much memory this process may use on the host."""

import os
from pathlib import Path


def read_host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the host, within the limit of this process's cgroup.

    A container sees the machine's ``/proc/meminfo``; planning with it would get the process killed.
    """
    total, available = _read_meminfo()
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    if limit is not None and limit < total:
        used = _read_int(Path("/sys/fs/cgroup/memory.current")) or 0
        total, available = limit, min(available, max(0, limit - used))
    return total, available


def _read_meminfo() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        # Not Linux: the installed memory is the best that the standard library knows.
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib["MemTotal"] << 10, kib.get("MemAvailable", kib["MemFree"]) << 10


def _read_int(path: Path) -> int | None:
    """Return the number a kernel file holds; None if there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
