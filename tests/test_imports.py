"""What the import contracts of pyproject.toml cannot say: no circles, and no package left out."""

import ast
import functools
import graphlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _modules() -> dict[str, Path]:
    found = {}
    for package in ("vllm", "vllm_ascend"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imported(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports, for annotations or inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


@functools.cache
def _graph() -> dict[str, set[str]]:
    return {
        name: {other for other in _imported(path) if other in MODULES and other != name}
        for name, path in MODULES.items()
    }


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = _graph()
    assert graph["vllm.v1.engine.core"] >= {"vllm.v1.messages", "vllm.v1.core.sched.scheduler"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_every_package_stands_in_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        name.strip()
        for contract in settings["contracts"]
        if contract["type"] == "layers"
        for layer in contract["layers"]
        for name in layer.replace("|", ":").split(":")
    ]
    packages = {name for name in MODULES if MODULES[name].name == "__init__.py"}
    homeless = {
        name
        for name in packages
        - {"vllm", "vllm.v1", "vllm.distributed", "vllm.cachelab", "vllm_ascend"}
        if not any(f"{name}.".startswith(f"{layer}.") for layer in layers)
    }
    assert homeless == set()
    assert settings["exclude_type_checking_imports"] is False


def test_config_is_a_leaf() -> None:
    """It knows its own modules and the errors, nothing of what it configures."""
    config = {name for name in MODULES if name.startswith("vllm.config")}
    known = {other for name in config for other in _graph()[name]}
    assert known - config == {"vllm.exceptions"}


def test_the_core_never_imports_the_engine() -> None:
    graph = _graph()
    below = [name for name in graph if name.startswith(("vllm.v1.core", "vllm.v1.request"))]
    assert not [
        (name, other)
        for name in below
        for other in graph[name]
        if other.startswith("vllm.v1.engine")
    ]
