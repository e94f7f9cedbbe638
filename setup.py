"""Packaging: the version, and the requirement files as dependencies and extras."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name: str) -> list[str]:
    """Return the requirements of requirements/NAME.txt, included files' among them."""
    requirements: list[str] = []
    for line in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("-r "):
            requirements += read_requirements(Path(text[3:]).stem)
        elif text:
            requirements.append(text)
    return requirements


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
    install_requires=read_requirements("common"),
    extras_require={
        "cpu": read_requirements("cpu"),
        "cuda": read_requirements("cuda"),
        "ascend": read_requirements("ascend"),
        "bench": read_requirements("bench"),
        "dev": read_requirements("dev"),
    },
)
