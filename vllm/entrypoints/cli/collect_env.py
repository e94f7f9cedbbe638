"""``vllm collect-env``: what to put into a bug report."""

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

from vllm import envs
from vllm.native.loader import find_vector_build, open_library
from vllm.platforms.resolve import is_cuda_available
from vllm.version import BANNER

_PACKAGES = (
    *(
        "torch",
        "torch-npu",
        "triton",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "fastapi",
    ),
    *(
        "fastapi",
        "uvicorn",
        "pydantic",
        "msgspec",
        "pyzmq",
        "prometheus_client",
        "jinja2",
        "openai",
    ),
)
_PREFIXES = ("VLLM_", "CUDA_", "ASCEND_", "OMP_", "MKL_", "TORCH_")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("collect-env", help="Describe this machine for a bug report.")
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    """Print the report."""
    print(make_report())
    return 0


def make_report() -> str:
    """Return the report; values of secrets are hidden."""
    lines = [
        BANNER,
        f"Python   {sys.version.split()[0]} at {sys.executable}",
        f"OS       {platform.platform()}",
        f"CPU      {_cpu_name()}, {os.cpu_count()} logical cores",
        f"Native   {_native_state()}",
        f"GPUs     {_gpu_state()}",
        "",
        *(f"{name:<18} {_version_of(name)}" for name in _PACKAGES),
        "",
        *(
            f"{name}={_shown(name, value)}"
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES)
        ),
    ]
    return "\n".join(lines).rstrip()


def _native_state() -> str:
    """Return which CPU kernels a model runs on, if on any."""
    if not envs.VLLM_NATIVE:
        return "off (VLLM_NATIVE=0): models run on torch"
    library = open_library()
    if isinstance(library, str):
        return f"off ({library}): models run on torch"
    return f"{find_vector_build(library)} build"


def _gpu_state() -> str:
    """Return the GPUs that torch reaches."""
    if not is_cuda_available():
        return "none that torch reaches"
    import torch  # noqa: PLC0415  (start-up: most machines have no GPU)

    cards = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        gib = card.total_memory / 2**30
        cards.append(f"{card.name} (compute capability {card.major}.{card.minor}, {gib:.0f} GiB)")
    return ", ".join(cards)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _shown(name: str, value: str) -> str:
    return "(set)" if any(word in name for word in _SECRETS) else value
