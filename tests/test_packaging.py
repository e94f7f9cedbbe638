"""One sdist, and one wheel made from it: nothing is missing, nothing is too much."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = (
    *("CHANGELOG.md", "MANIFEST.in", "Makefile", "README.md", "pyproject.toml", "setup.py"),
    *("requirements", "vllm", "vllm_ascend"),
)
CHECKPOINT = {
    f"vllm/assets/deepseek-v4/{name}"
    for name in (
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    )
}
CORPUS = "vllm/assets/deepseek-v4/corpus.txt"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], str]:
    """Names in the sdist, names in the wheel, the wheel's entry points."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    (wheel,) = (tree / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as zipped:
        in_wheel = set(zipped.namelist())
        (points,) = [name for name in in_wheel if name.endswith("entry_points.txt")]
        return in_sdist, in_wheel, zipped.read(points).decode()


@pytest.mark.slow
def test_the_sdist_holds_what_a_checkout_needs(built: tuple[set[str], set[str], str]) -> None:
    in_sdist, _, _ = built
    requirements = {f"requirements/{path.name}" for path in (ROOT / "requirements").iterdir()}
    assert requirements | CHECKPOINT | {CORPUS, "Makefile", "MANIFEST.in"} <= in_sdist


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_the_checkpoint(
    built: tuple[set[str], set[str], str],
) -> None:
    _, in_wheel, entry_points = built
    modules = {
        str(path.relative_to(ROOT))
        for package in ("vllm", "vllm_ascend")
        for path in (ROOT / package).rglob("*.py")
    }
    assert modules | CHECKPOINT | {"vllm/py.typed", "vllm_ascend/py.typed"} <= in_wheel
    assert CORPUS not in in_wheel
    tops = {name.partition("/")[0] for name in in_wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm", "vllm_ascend"}
    assert "vllm = vllm.entrypoints.cli.main:main" in entry_points
