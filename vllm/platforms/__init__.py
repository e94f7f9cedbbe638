"""The device this process runs on: ``current_platform``, found on first access.

Importing this package loads no torch; neither does asking for ``current_platform`` where torch was
built for the CPU only.
"""

from typing import TYPE_CHECKING, Any

from vllm.platforms.interface import Platform
from vllm.platforms.resolve import get_current_platform

if TYPE_CHECKING:
    current_platform: Platform

__all__ = ["Platform", "current_platform"]


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return get_current_platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
