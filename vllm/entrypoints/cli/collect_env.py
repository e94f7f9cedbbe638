"""``vllm collect-env``: what to put into a bug report."""

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

from vllm import envs
from vllm.exceptions import VllmError
from vllm.native.loader import find_vector_build, open_library
from vllm.platforms.resolve import get_current_platform, is_cuda_available
from vllm.version import BANNER

_PACKAGES = (
    *("torch", "torch-npu", "triton", "transformers"),
    *("tokenizers", "safetensors", "numpy", "llguidance"),
    *("fastapi", "uvicorn", "pydantic", "msgspec"),
    *("pyzmq", "prometheus_client", "jinja2", "openai"),
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
        *_describe_devices(),
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


def _describe_devices() -> list[str]:
    """Return the lines about the platform that would serve, and its GPUs."""
    platform_line = f"Platform {_platform_name()}"
    if not is_cuda_available():
        return [platform_line, "GPUs     none that torch reaches"]
    import torch  # noqa: PLC0415  (start-up: most machines have no GPU)

    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    versions = (
        f"CUDA     {torch.version.cuda} of torch, cuDNN {cudnn}, NCCL {nccl}, compiled for "
        f"{' '.join(torch.cuda.get_arch_list())}; driver {_driver_version()}"
    )
    return [platform_line, versions, *describe_cards(torch.cuda)]


def _platform_name() -> str:
    """Return the platform's name, and why its kernels cannot run if they cannot."""
    try:
        found = get_current_platform()
    except VllmError as error:
        return f"none ({error})"
    obstacle = getattr(found, "find_kernel_obstacle", lambda: "")()
    return f"{found.device_name}{f' (no Triton kernels: {obstacle})' if obstacle else ''}"


def describe_cards(cuda: Any) -> list[str]:
    """Return a line for each card that ``torch.cuda``, or its like, reaches.

    What another process's work or a driver makes of one card must not hide the others.
    """
    lines = []
    for index in range(cuda.device_count()):
        card = cuda.get_device_properties(index)
        try:
            free, total = cuda.mem_get_info(index)
            memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        except RuntimeError as error:
            memory = f"{card.total_memory / 2**30:.1f} GiB; it cannot be used: {error}"
        lines.append(
            f"GPU {index}    {card.name}, compute capability {card.major}.{card.minor}, "
            f"{card.multi_processor_count} multiprocessors, {memory}"
        )
    return lines or ["GPUs     none that torch reaches"]


def _driver_version() -> str:
    """Return what the kernel module says of itself."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"


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
