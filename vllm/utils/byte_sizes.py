"""Sizes as people write them."""

from __future__ import annotations

from vllm.exceptions import ConfigError


def parse_size(name: str, text: str) -> int:
    """Return bytes of a text such as ``8GiB``, ``500MB``, ``8G`` or ``1073741824``.

    Args:
        name: Of the setting, for the error.
        text: What is set.

    Raises:
        ConfigError: It is no size.
    """
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units[letter] = units[letter + "IB"] = 1024**power
        units[letter + "B"] = 1000**power
    stripped = text.strip().upper()
    digits = stripped.rstrip("KMGTIB ")
    unit = stripped[len(digits) :].strip()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    if unit not in units or not 0 < number < float("inf"):
        raise ConfigError(
            f"{name}={text!r} is no size: write bytes, or a number such as 8GiB or 500MB."
        )
    return int(number * units[unit])


def show_size(num_bytes: int) -> str:
    """Return bytes as people read them: ``2.9 MiB``, ``16.0 GiB``."""
    units = ("KiB", "MiB", "GiB")
    power = next((p for p in (1, 2) if num_bytes < 1024 ** (p + 1)), 3)
    return f"{num_bytes / 1024**power:.1f} {units[power - 1]}"
