"""Packaging: the version and what goes into the wheel; pyproject.toml has the rest."""

import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "csrc"))

from compile import LIBRARY_NAME, CompileError, build  # noqa: E402

_NATIVE = "vllm.native.libvllm_native"


class BuildNative(build_ext):
    """Compiles ``csrc/``; where that fails the package is whole without it and runs on torch."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path: it is loaded by ctypes and bound to no Python version."""
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY_NAME)

    def build_extension(self, ext: Extension) -> None:
        """Build the one library."""
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            build(target.parent)
        except CompileError as error:
            self.warn(f"native kernels not built, serving will run on torch alone: {error}")


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag."""
        return ("py3", "none", super().get_tag()[2])


def read_version() -> str:
    """Return the version without importing the package."""
    text = (ROOT / "vllm" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "([^"]+)"', text)
    assert match is not None
    return match.group(1)


setup(
    version=read_version(),
    packages=find_packages(include=["vllm", "vllm.*", "vllm_ascend", "vllm_ascend.*"]),
    # The sdist holds more (MANIFEST.in: the tokenizer's training text, tests); wheels do not.
    include_package_data=False,
    package_data={
        "vllm": ["py.typed"],
        "vllm.assets": ["deepseek-v4/*.json", "deepseek-v4/*.safetensors"],
        "vllm.entrypoints.openai.pages": ["*.html", "*.css", "*.js"],
        "vllm_ascend": ["py.typed"],
    },
    ext_modules=[Extension(_NATIVE, sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
