"""One sdist, and one wheel made from it: nothing is missing, nothing is too much."""

import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.building import ROOT, has_compiler, read_pins

CHECKPOINT = {
    f"vllm/assets/deepseek-v4/{name}"
    for name in (
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    )
}
CORPUS = "vllm/assets/deepseek-v4/corpus.txt"


@pytest.fixture(scope="module")
def built(distribution: Path) -> tuple[set[str], set[str], str]:
    """Names in the sdist, names in the wheel, the wheel's entry points."""
    (sdist,) = distribution.glob("*.tar.gz")
    (wheel,) = distribution.glob("*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as zipped:
        in_wheel = set(zipped.namelist())
        (points,) = [name for name in in_wheel if name.endswith("entry_points.txt")]
        return in_sdist, in_wheel, zipped.read(points).decode()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the library is compiled where none lies built
def test_the_sdist_holds_what_a_checkout_needs(built: tuple[set[str], set[str], str]) -> None:
    in_sdist, _, _ = built
    folders = (ROOT / "requirements", ROOT / "csrc")
    sources = {
        f"{folder.name}/{path.name}"
        for folder in folders
        for path in folder.iterdir()
        if path.is_file()
    }
    assert sources | CHECKPOINT | {CORPUS, "Makefile", "MANIFEST.in"} <= in_sdist


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the library is compiled where none lies built
def test_the_wheel_holds_both_packages_and_the_checkpoint(
    built: tuple[set[str], set[str], str],
) -> None:
    _, in_wheel, entry_points = built
    modules = {
        str(path.relative_to(ROOT))
        for package in ("vllm", "vllm_ascend")
        for path in (ROOT / package).rglob("*.py")
    }
    # The build found every header that it needs.
    library = {"vllm/native/libvllm_native.so"} if has_compiler() else set()
    assert modules | library | CHECKPOINT | {"vllm/py.typed", "vllm_ascend/py.typed"} <= in_wheel
    assert CORPUS not in in_wheel
    tops = {name.partition("/")[0] for name in in_wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm", "vllm_ascend"}
    assert "vllm = vllm.entrypoints.cli.main:main" in entry_points


def test_the_sdist_holds_what_tests_and_benchmarks_import() -> None:
    lines = (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()
    grafted = {line.removeprefix("graft ") for line in lines if line.startswith("graft ")}
    files = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    tops = {
        top
        for path in files
        for top in re.findall(r"^(?:from|import) (\w+)", path.read_text("utf-8"), re.MULTILINE)
        if (ROOT / top).is_dir()
    }
    assert {"tests", "vllm"} <= tops
    assert tops - {"vllm", "vllm_ascend"} <= grafted


def _read_dependencies() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["otel"], *extras["ray"]]
    return {(one := Requirement(line)).name.lower(): one for line in lines}


def test_every_pin_lies_in_the_range_that_the_package_promises() -> None:
    ranges, pins = _read_dependencies(), read_pins()
    assert set(ranges) == set(pins)
    outside = {name: pins[name] for name, one in ranges.items() if pins[name] not in one.specifier}
    assert outside == {}


def test_every_range_has_two_ends() -> None:
    for one in _read_dependencies().values():
        assert {specifier.operator for specifier in one.specifier} == {">=", "<"}, one
