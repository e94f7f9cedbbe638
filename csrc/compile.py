"""Builds ``libvllm_native.so`` from this folder: ``python csrc/compile.py [FOLDER]``.

Only the standard library is used, so that a build needs a compiler and nothing else: the one that
``CXX`` names, else c++, g++ or clang++, else the clang in the ``ziglang`` package if it is
installed. Without any the product runs on torch, and this says so in one line.

Objects stay in ``build/objects``: of a change only what includes it is compiled again.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SOURCES = Path(__file__).resolve().parent
LIBRARY_NAME = "libvllm_native.so"
DEFAULT_FOLDER = SOURCES.parent / "vllm" / "native"
_OBJECTS = SOURCES.parent / "build" / "objects"

# No -march=native and no -ffast-math: a wheel runs on other machines, and sums keep their order.
_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
# The clang of ziglang adds debug information on its own: two thirds of the library.
_FLAGS += ["-fvisibility=hidden", "-g0", "-Wall", "-Wextra"]
# GCC's own intrinsics trip these two.
_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# Of the portable build where all but very old processors run another: it compiles in a third.
_SELDOM_RUN = ["-O2"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2]
_VNNI = ["-mavx512vnni", *_AVX512]
# Beside the builds: products of bytes by processors that have more for them.
_BYTE_BUILDS = {"vnni": _VNNI, "vbmi": ["-mavx512vbmi", *_VNNI]}
_AMX = ["-mamx-tile", "-mamx-bf16", "-mamx-int8", *_AVX512]
# Compiled for each vector build, the longest first, and once.
_KERNEL_SOURCES = ("bytes.cpp", "panels.cpp", "products.cpp", "decoder.cpp", "deepseek_v4.cpp")
_KERNEL_SOURCES += ("deepseek_v41.cpp", "recurrent.cpp", "sampling.cpp", "towers.cpp", "build.cpp")
_PLAIN_SOURCES = ("pack_blocks.cpp", "prefix_hash.cpp", "thread_pool.cpp", "vllm_native.cpp")
_SANITISE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1"]
# GCC takes many minutes for kernels whose every access is checked in line. What these two checks
# of undefined behaviour find, the checks of addresses find too.
_SANITISE += ["--param", "asan-instrumentation-with-call-threshold=0"]
_SANITISE += ["-fno-sanitize=null,object-size"]


_Job = TypeVar("_Job")


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
    seldom = _SELDOM_RUN if is_x86() else []
    builds = [VectorBuild("portable", "kPortableBuild", seldom)]
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
    base = [*compiler, *_FLAGS, *_baseline(compiler), *(_SANITISE if sanitises else [])]
    objects = [_Object.of(base + own, source) for source, own in _list_jobs()]
    _run_all(_Object.make, [item for item in objects if not item.is_current()])
    with tempfile.TemporaryDirectory() as scratch:
        linked = Path(scratch) / LIBRARY_NAME
        link = [*base, "-shared", "-o", str(linked), *(str(item.path) for item in objects)]
        _run_all(_run, [link])
        folder.mkdir(parents=True, exist_ok=True)
        # In one move: a server that has the old one open keeps it.
        fresh = folder / f".{LIBRARY_NAME}.new"
        shutil.copy(linked, fresh)
        fresh.replace(folder / LIBRARY_NAME)
    return folder / LIBRARY_NAME


def _list_jobs() -> list[tuple[str, list[str]]]:
    """Return each source and its own flags, in the order in which objects are linked."""
    jobs = []
    # The portable build comes first: of a template of the standard library that several builds
    # hold, the first one linked is kept, and it has to run everywhere.
    for item in vector_builds():
        names = [f"-DVN_BUILD={item.name}", f"-DVN_BUILD_TABLE={item.table}"]
        jobs += [(source, [*item.flags, *names]) for source in _KERNEL_SOURCES]
    jobs += [(source, []) for source in _PLAIN_SOURCES]
    jobs.append(("tiles.cpp", _AMX if is_x86() else []))
    for name, flags in _BYTE_BUILDS.items():
        names = [f"-DVN_BUILD={name}", f"-DVN_DOT_BYTE_PANEL=dot_byte_panel_{name}"]
        jobs.append(("bytes_vnni.cpp", [*(flags if is_x86() else []), *names]))
    if is_x86():
        jobs.append(("panels.cpp", [*_BYTE_BUILDS["vbmi"], "-DVN_BUILD=vbmi"]))
    return jobs


@dataclass(frozen=True)
class _Object:
    """A compiled source, beside the list of the files that it was made of."""

    compiler: list[str]
    source: str
    path: Path

    @classmethod
    def of(cls, compiler: list[str], source: str) -> "_Object":
        digest = hashlib.sha256("\0".join(compiler).encode()).hexdigest()[:12]
        return cls(compiler, source, _OBJECTS / f"{Path(source).stem}-{digest}.o")

    def is_current(self) -> bool:
        """Whether it is newer than all that it was made of."""
        made_of = self.path.with_suffix(".d")
        if not (self.path.exists() and made_of.exists()):
            return False
        built = self.path.stat().st_mtime
        words = made_of.read_text().partition(":")[2].replace("\\\n", " ")
        sources = [Path(word) for word in shlex.split(words)]
        # A copied checkout has the objects of another's sources.
        return SOURCES / self.source in sources and all(
            item.exists() and item.stat().st_mtime <= built for item in sources
        )

    def make(self) -> str:
        """Compile it; returns what _run does."""
        started = time.time()
        fresh = self.path.with_suffix(f".{os.getpid()}")
        made_of = ["-MMD", "-MF", str(self.path.with_suffix(".d"))]
        words = _run([*self.compiler, *made_of, "-c", str(SOURCES / self.source), "-o", str(fresh)])
        if not words:
            # As old as its sources were when they were read; whole, or not there.
            os.utime(fresh, (started, started))
            fresh.replace(self.path)
        return words


def _baseline(compiler: list[str]) -> list[str]:
    """Return what makes a compiler forget this machine's own processor."""
    if "ziglang" in compiler:
        return ["-mcpu=x86_64" if is_x86() else "-mcpu=generic"]
    return ["-march=x86-64"] if is_x86() else []


def _run_all(run: Callable[[_Job], str], jobs: list[_Job]) -> None:
    """Run jobs, as many at a time as there are processors for them."""
    try:
        _OBJECTS.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_count_processors()) as pool:
            failed = [words for words in pool.map(run, jobs) if words]
    except OSError as error:
        raise CompileError(f"the C++ compiler cannot be run: {error}") from error
    if failed:
        raise CompileError(failed[-1])


def _run(command: list[str]) -> str:
    """Return the command and the end of its words if it fails, else nothing."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    words = result.stdout.decode(errors="replace")
    return f"{shlex.join(command)}\n{words[-2000:]}" if result.returncode else ""


def _count_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
