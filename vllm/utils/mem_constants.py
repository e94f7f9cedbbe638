"""Sizes of memory, in bytes."""

KiB_bytes = 1 << 10
MiB_bytes = 1 << 20
GiB_bytes = 1 << 30


def format_size(num_bytes: int) -> str:
    """Return bytes for a message: "1.50 GiB", or "3.25 MiB" where GiB would say nothing."""
    if num_bytes >= GiB_bytes // 10:
        return f"{num_bytes / GiB_bytes:.2f} GiB"
    return f"{num_bytes / MiB_bytes:.2f} MiB"
