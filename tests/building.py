"""The distribution, built from a copy of the sources: a checkout stays as it is."""

import fcntl
import functools
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm.native.loader import load_library

ROOT = Path(__file__).parents[1]
_SOURCES = (
    *(
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "Makefile",
    ),
    *("README.md", "SECURITY.md", "mkdocs.yml", "pyproject.toml", "setup.py"),
    *("csrc", "requirements", "vllm", "vllm_ascend"),
)


def build_once(tree: Path) -> Path:
    """Build an sdist, and a wheel from it, unless it is done; return their folder.

    Test processes side by side may ask for the same folder: one builds, the others wait.

    Args:
        tree: A folder that is not there yet, or one built before; gets the copy.

    Raises:
        AssertionError: The build failed.
    """
    with tree.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (tree / "dist").exists():
            _build(tree)
    return tree / "dist"


@functools.cache
def _load_script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "csrc" / "compile.py"))


def has_compiler() -> bool:
    """Whether the package is built with its library here."""
    return _load_script()["find_compiler"]() is not None


def _choose_compiler() -> dict[str, str]:
    """Return variables of the build: a library that is newer than all sources is built no more."""
    script = _load_script()
    library = script["DEFAULT_FOLDER"] / script["LIBRARY_NAME"]
    compiler = script["find_compiler"]()
    if compiler is None or not script["is_current"](library) or load_library() is None:
        return {}
    ready = [sys.executable, str(ROOT / "tests" / "ready_compiler.py"), str(library)]
    return {"CXX": shlex.join([*ready, *compiler])}


def _build(tree: Path) -> None:
    tree.mkdir(exist_ok=True)
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    # Where there is no compiler one would be asked for: minutes, for a library that is not tested.
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    command.append(str(tree))
    environment = {**os.environ, **_choose_compiler()}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        shutil.rmtree(tree)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def read_pins() -> dict[str, str]:
    """Return package -> exact version, of what ``make serve`` and the extras install."""
    pins = {}
    for name in ("common", "cpu", "otel", "ray"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8")
        for line in text.splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement and not requirement.startswith("-"):
                package, _, version = requirement.partition("==")
                pins[package.partition("[")[0].lower()] = version
    return pins
