"""setuptools' build backend, which also asks for a compiler where the machine has none."""

from typing import Any

from compile import find_compiler
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not changed below)

_COMPILER = "ziglang>=0.13"


def _with_compiler(requirements: list[str]) -> list[str]:
    return requirements if find_compiler() else [*requirements, _COMPILER]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a wheel is built with."""
    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable install is built with."""
    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))
