"""csrc/compile.py: which compiler is taken, and what is said where there is none."""

import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.building import ROOT

SCRIPT = ROOT / "csrc" / "compile.py"


def run_without_compiler(*arguments: object, **variables: str) -> tuple[int, str]:
    """Runs the script where no program is found; returns its status and its words."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    result = subprocess.run(
        # -S: no installed package is found either.
        [sys.executable, "-S", SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**environment, "PATH": "/nonexistent", "PYTHONPATH": "", **variables},
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize(("strict", "status"), [([], 0), (["--strict"], 1)])
def test_without_a_compiler_one_line_says_so(
    strict: list[str], status: int, tmp_path: Path
) -> None:
    found, words = run_without_compiler(tmp_path, *strict)
    assert found == status
    assert words.startswith("native kernels: not built, serving runs on torch alone (no C++ comp")
    assert words.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    found, words = run_without_compiler(tmp_path, CXX="none")
    assert found == 0
    assert "cannot be run" in words
    assert words.count("\n") == 1


def test_compilers_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_compiler = runpy.run_path(str(SCRIPT))["find_compiler"]
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    assert find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    for name in ("clang++", "g++", "c++"):
        program = tmp_path / name
        program.touch(mode=0o755)
        assert find_compiler() == [str(program)]
    monkeypatch.setenv("CXX", "ccache my-c++ -m64")
    assert find_compiler() == ["ccache", "my-c++", "-m64"]


# Each object is made of its source and, of products.cpp, a header.
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    -MF) deps=$2 ;;
    -o) object=$2 ;;
    *.cpp) source=$1 ;;
  esac
  shift
done
: > "$object"
[ -n "$source" ] || exit 0
echo "${source##*/}" >> "$LOG"
echo "x.o: $source" > "$deps"
case $source in
  */products.cpp) echo " ${source%.cpp}.h" >> "$deps" ;;
esac
case $source in
  */$FAILS) exit 1 ;;
esac
"""


def test_only_what_changed_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, log, compiler = tmp_path / "csrc", tmp_path / "log", tmp_path / "c++"
    shutil.copytree(ROOT / "csrc", sources)
    compiler.write_text(COMPILER.replace("x.o: $source", "x.o: $source \\\\"))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("FAILS", "none")
    script = runpy.run_path(str(sources / "compile.py"))

    def build() -> list[str]:
        log.write_text("")
        script["build"](tmp_path / "library")
        return sorted(log.read_text().split())

    num_builds = len(script["vector_builds"]())
    assert build().count("products.cpp") == num_builds
    assert build() == []
    future = time.time() + 10
    os.utime(sources / "products.h", (future, future))
    monkeypatch.setenv("FAILS", "products.cpp")
    with pytest.raises(script["CompileError"], match=r"products\.cpp"):
        build()
    monkeypatch.setenv("FAILS", "none")
    os.utime(sources / "products.h", (0, 0))
    os.utime(sources / "sampling.cpp", (future, future))
    assert build() == ["sampling.cpp"] * num_builds
    # A copied checkout has the objects of another's sources.
    os.utime(sources / "sampling.cpp", (0, 0))
    shutil.copytree(sources, tmp_path / "another")
    for made_of in (tmp_path / "build" / "objects").glob("sampling*.d"):
        words = made_of.read_text().replace(str(sources), str(tmp_path / "another"))
        made_of.write_text(words)
    assert build() == ["sampling.cpp"] * num_builds


def test_a_build_asks_for_a_compiler_where_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "csrc")
    backend = runpy.run_path(str(ROOT / "csrc" / "build_backend.py"))
    monkeypatch.setenv("CXX", "a-compiler")
    assert backend["_with_compiler"](["wheel"]) == ["wheel"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert backend["_with_compiler"](["wheel"]) == ["wheel", "ziglang>=0.13"]
