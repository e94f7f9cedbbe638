"""How many cores this process may use on the host."""

import math
import os
from pathlib import Path


def count_usable_cores() -> int:
    """Return the physical cores of this process's affinity mask, within its cgroup's CPU quota.

    Two hyper-threads of a core share its vector units, so a second thread there only gets in the
    first one's way; and threads beyond a container's quota wait for each other's time slices.
    """
    cores = {_core_of(cpu) for cpu in _usable_cpus()}
    quota = read_cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def read_cpu_quota(path: Path) -> float | None:
    """Return the CPUs a cgroup's ``cpu.max`` ("quota period") grants; None: no limit."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> str:
    """Return the siblings of a logical CPU as the kernel lists them: one text per physical core."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)  # no topology to see: count every logical CPU
