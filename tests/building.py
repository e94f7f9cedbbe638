"""The distribution, built from a copy of the sources: a checkout stays as it is."""

import shutil
import subprocess
import sys
from pathlib import Path

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


def build(tree: Path) -> Path:
    """Build an sdist, and a wheel from it; return their folder.

    Args:
        tree: An empty folder; gets the copy.
    """
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return tree / "dist"


def read_pins() -> dict[str, str]:
    """Return package -> exact version, of what ``make serve`` and the extras install."""
    pins = {}
    for name in ("common", "cpu", "otel"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8")
        for line in text.splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement and not requirement.startswith("-"):
                package, _, version = requirement.partition("==")
                pins[package.partition("[")[0].lower()] = version
    return pins
