"""How many cores this process may use on the host."""

import math
import os
from pathlib import Path

from vllm.exceptions import ConfigError

_FREE = ("auto", "nobind")


def count_usable_cores() -> int:
    """Return the physical cores of this process's affinity mask, within its cgroup's CPU quota.

    Two hyper-threads of a core share its vector units, so a second thread there only gets in the
    first one's way; and threads beyond a container's quota wait for each other's time slices.
    """
    cores = {_core_of(cpu) for cpu in _usable_cpus()}
    quota = read_cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def parse_binding(value: str, local_rank: int) -> frozenset[int] | None:
    """Return the logical CPUs that a worker's threads shall keep to; None: any.

    Args:
        value: "auto" or "nobind": any. Else CPUs and ranges of them by comma, "0-3,8"; lists of
            several workers on this host by "|", "0-3|4-7".
        local_rank: The worker's number on this host.

    Raises:
        ConfigError: The value is no such list, or has none for the rank, or names a CPU that this
            process must not use.
    """
    if value in _FREE:
        return None
    lists = value.split("|")
    if local_rank >= len(lists):
        raise _bad_binding(value, f"it has no list for worker {local_rank}")
    usable = _usable_cpus()
    found: set[int] = set()
    for part in lists[local_rank].split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise _bad_binding(value, f"{part!r} is no CPU and no range of CPUs")
        low, high = int(first), int(last or first)
        # Ends first: a range may be too long to be listed.
        if low > high or not {low, high} <= usable:
            raise _bad_binding(value, f"this process may use the CPUs {_list_cpus(usable)}")
        found.update(range(low, high + 1))
    if not found <= usable:
        raise _bad_binding(value, f"this process may use the CPUs {_list_cpus(usable)}")
    return frozenset(found)


def bind_to(cpus: frozenset[int]) -> bool:
    """Keep this thread, and those it starts from now on, to some CPUs; False: the host cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, cpus)
    return True


def _list_cpus(cpus: set[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


def _bad_binding(value: str, reason: str) -> ConfigError:
    return ConfigError(
        f"VLLM_CPU_OMP_THREADS_BIND={value!r}: {reason}. Give auto, nobind, or CPUs such as 0-3 or "
        "0,2 (of several workers: 0-3|4-7)."
    )


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
