"""Builds ``libvllm_native.so`` from this folder: ``python csrc/compile.py [FOLDER]``.

Only the standard library is used, so that a build needs a compiler and nothing else: the one that
``CXX`` names, else c++, g++ or clang++, else the clang in the ``ziglang`` package if it is
installed. Without any the product runs on torch, and this says so in one line.
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY_NAME = "libvllm_native.so"
DEFAULT_FOLDER = SOURCES.parent / "vllm" / "native"

# No -march=native and no -ffast-math: a wheel runs on other machines, and sums keep their order.
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
# The clang of ziglang adds debug information on its own: two thirds of the library.
_FLAGS += ["-fvisibility=hidden", "-g0", "-Wall", "-Wextra"]
# GCC's own intrinsics trip these two.
_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2]
_VNNI = ["-mavx512vnni", *_AVX512]
_AMX = ["-mamx-tile", "-mamx-bf16", "-mamx-int8", *_AVX512]
_PLAIN_SOURCES = ("pack_blocks.cpp", "prefix_hash.cpp", "thread_pool.cpp", "vllm_native.cpp")
_SANITISE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]


class CompileError(Exception):
    """No compiler, or one that failed."""


@dataclass(frozen=True)
class VectorBuild:
    """One compilation of the kernels."""

    name: str
    table: str
    flags: list[str]


def is_x86() -> bool:
    """Whether this is a processor of the x86-64 kind."""
    return platform.machine() in ("x86_64", "AMD64")


def vector_builds() -> list[VectorBuild]:
    """Return the builds of this kind of processor; which one runs is chosen at run time."""
    builds = [VectorBuild("portable", "kPortableBuild", [])]
    if is_x86():
        builds.append(VectorBuild("avx2", "kAvx2Build", _AVX2))
        builds.append(VectorBuild("avx512", "kAvx512Build", _AVX512))
    return builds


def find_compiler() -> list[str] | None:
    """Return the command of a C++ compiler, or None."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def is_current(library: Path) -> bool:
    """Whether a built library is newer than every source."""
    if not library.exists():
        return False
    built = library.stat().st_mtime
    return all(path.stat().st_mtime <= built for path in SOURCES.iterdir() if path.is_file())


def build(folder: Path, *, sanitises: bool = False) -> Path:
    """Compile the library into a folder.

    Raises:
        CompileError: There is no compiler, or it failed; the message ends with its words.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler: install g++ or clang++, or the PyPI package ziglang")
    flags = _FLAGS + _baseline(compiler) + (_SANITISE if sanitises else [])
    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for item in vector_builds():
            names = [f"-DVN_BUILD={item.name}", f"-DVN_BUILD_TABLE={item.table}"]
            jobs.append(("build.cpp", f"{item.name}.o", [*item.flags, *names]))
        jobs += [(name, f"{name}.o", []) for name in _PLAIN_SOURCES]
        for source, own in (("tiles.cpp", _AMX), ("bytes_vnni.cpp", _VNNI)):
            jobs.append((source, f"{source}.o", own if is_x86() else []))
        objects = [str(Path(scratch) / target) for _, target, _ in jobs]
        commands = [
            [*compiler, *flags, *own, "-c", str(SOURCES / source), "-o", target]
            for (source, _, own), target in zip(jobs, objects, strict=True)
        ]
        _run_all(commands)
        linked = Path(scratch) / LIBRARY_NAME
        _run_all([[*compiler, *flags, "-shared", "-o", str(linked), *objects]])
        folder.mkdir(parents=True, exist_ok=True)
        # In one move: a server that has the old one open keeps it.
        fresh = folder / f".{LIBRARY_NAME}.new"
        shutil.copy(linked, fresh)
        fresh.replace(folder / LIBRARY_NAME)
    return folder / LIBRARY_NAME


def _baseline(compiler: list[str]) -> list[str]:
    """Return what makes a compiler forget this machine's own processor."""
    if "ziglang" in compiler:
        return ["-mcpu=x86_64" if is_x86() else "-mcpu=generic"]
    return ["-march=x86-64"] if is_x86() else []


def _run_all(commands: list[list[str]]) -> None:
    """Run commands at the same time."""
    try:
        running = [
            (command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            for command in commands
        ]
    except OSError as error:
        raise CompileError(f"the C++ compiler cannot be run: {error}") from error
    failed = ""
    for command, process in running:
        words = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            failed = f"{shlex.join(command)}\n{words[-2000:]}"
    if failed:
        raise CompileError(failed)


def main(arguments: list[str]) -> int:
    """Build unless the library is current; report in one line what was done."""
    sanitises = "--sanitise" in arguments
    folders = [Path(item) for item in arguments if not item.startswith("-")]
    folder = folders[0] if folders else DEFAULT_FOLDER
    library = folder / LIBRARY_NAME
    if is_current(library) and not sanitises:
        return 0
    try:
        build(folder, sanitises=sanitises)
    except CompileError as error:
        print(f"native kernels: not built, serving runs on torch alone ({error})", file=sys.stderr)
        return 1 if "--strict" in arguments else 0
    print(f"native kernels: built {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
