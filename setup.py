"""Packaging: the version and what goes into the wheel; pyproject.toml has the rest."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


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
        "vllm_ascend": ["py.typed"],
    },
)
