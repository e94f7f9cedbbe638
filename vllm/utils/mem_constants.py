"""Sizes of memory, in bytes."""

KB_bytes = 1_000
MB_bytes = 1_000_000
GB_bytes = 1_000_000_000

KiB_bytes = 1 << 10
MiB_bytes = 1 << 20
GiB_bytes = 1 << 30
