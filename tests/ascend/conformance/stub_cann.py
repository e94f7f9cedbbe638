"""Generates empty stand-ins for the CANN libraries that the torch-npu wheel is linked against.

They let ``import torch_npu`` work on a machine without Ascend software, for its schemas and Meta
kernels. Every function returns 0; nothing can run on them. Needs binutils' readelf and nm, and a
C compiler.

    python stub_cann.py OUT_FOLDER      # then LD_LIBRARY_PATH=OUT_FOLDER
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

# CANN's C interfaces; everything else the wheel lacks comes from torch, Python or libc.
_CANN_SYMBOL = re.compile(r"(acl|Msprof|rt[A-Z]|Hccl|ge[A-Z]|Prof)\w+")
_CANN_LIBRARY = re.compile(
    r"lib(hccl|ascendcl|acl_\w+|ge_\w+|graph|runtime|profapi|msprofiler)\.so"
)
_SYMBOL_LIBRARY = "libascendcl.so"


def find_needs(package: Path) -> tuple[set[str], set[str]]:
    """Return the CANN libraries and symbols that a torch_npu folder needs to be imported."""
    libraries, symbols = {_SYMBOL_LIBRARY}, set()
    for file in (*package.glob("lib/*.so"), *package.glob("_C*.so")):
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", str(file)))
        libraries |= {name for name in needed if _CANN_LIBRARY.fullmatch(name)}
        names = _run("nm", "-D", "--undefined-only", str(file)).split()
        symbols |= {name for name in names if _CANN_SYMBOL.fullmatch(name)}
    return libraries, symbols


def write_stubs(libraries: set[str], symbols: set[str], folder: Path) -> None:
    """Compile one library with all symbols, and the others empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for library in sorted(libraries):
        names = sorted(symbols) if library == _SYMBOL_LIBRARY else []
        source = folder / f"{library}.c"
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
        compiler = os.environ.get("CC", "cc")
        _run(
            compiler,
            "-shared",
            "-fPIC",
            "-w",
            "-fno-builtin",
            "-o",
            str(folder / library),
            str(source),
        )


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the stubs into the folder named on the command line."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        sys.exit("torch_npu is not installed in this Python: pip install torch-npu")
    libraries, symbols = find_needs(Path(spec.origin).parent)
    write_stubs(libraries, symbols, Path(sys.argv[1]))
    print(f"{len(libraries)} libraries, {len(symbols)} symbols stubbed in {sys.argv[1]}")


if __name__ == "__main__":
    main()
