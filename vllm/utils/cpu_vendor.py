"""Who made this machine's processor."""

from pathlib import Path


def find_cpu_vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the processor's vendor id, such as "GenuineIntel"; None where it is not told.

    Args:
        cpuinfo: The kernel's description of the processors; systems without one tell nothing.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), None
    )
