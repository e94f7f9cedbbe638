"""A compiler for builds of the package where its library lies built: it reads, and links a copy.

``ready_compiler.py LIBRARY COMPILER... ARGUMENTS...`` stands where ``CXX`` names a compiler. Every
source is read with all that it includes, so that a header that a distribution lacks fails the
build; only the minutes of making code are spared.
"""

import shutil
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Do one step of a build; returns the exit code."""
    library, *command = arguments
    if "-c" in command:
        return subprocess.run(["-E" if a == "-c" else a for a in command], check=False).returncode
    shutil.copy(library, command[command.index("-o") + 1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
