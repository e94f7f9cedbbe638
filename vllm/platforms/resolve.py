"""Choosing the platform: an active plug-in, else CUDA where a GPU is visible, else the CPU."""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable

from vllm import envs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.platforms.interface import Platform

logger = init_logger(__name__)

PLUGIN_GROUP = "vllm.platform_plugins"
CPU_PATH = "vllm.platforms.cpu.CpuPlatform"
CUDA_PATH = "vllm.platforms.cuda.CudaPlatform"
CUDA_REFERENCE_PATH = "vllm.platforms.cuda.CudaReferencePlatform"


@functools.cache
def get_current_platform() -> Platform:
    """Find and build the platform; the same object on every call.

    Raises:
        ConfigError: Several plug-ins are active, or an active one names no platform class.
    """
    found = find_plugin_platform()
    if found is None and envs.VLLM_CUDA_REFERENCE:
        found = load_platform(CUDA_REFERENCE_PATH)
    return found or load_platform(choose_platform_path((), is_cuda_available))


def find_plugin_platform() -> Platform | None:
    """Build the active plug-in's platform; None without one.

    For processes that must not load torch: looking for CUDA can mean importing it.

    Raises:
        ConfigError: Several plug-ins are active, or an active one names no platform class.
    """
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    path = choose_platform_path(plugins, lambda: False)
    return None if path == CPU_PATH else load_platform(path)


def choose_platform_path(
    plugins: Iterable[importlib.metadata.EntryPoint], has_cuda: Callable[[], bool]
) -> str:
    """Return the dotted path of the platform class to use.

    Args:
        plugins: Entry points; each names a function that returns a dotted path, or None where its
            device is absent.
        has_cuda: Asked only if no plug-in is active.

    Raises:
        ConfigError: More than one plug-in is active.
    """
    active: dict[str, str] = {}
    for plugin in plugins:
        path = _ask_plugin(plugin)
        if path is not None:
            active[plugin.name] = path
    if len(active) > 1:
        listed = ", ".join(f"{name} ({path})" for name, path in sorted(active.items()))
        raise ConfigError(
            f"{len(active)} platform plug-ins are active, but a process has one platform: "
            f"{listed}. Uninstall or deactivate all but one."
        )
    if active:
        return next(iter(active.values()))
    return CUDA_PATH if has_cuda() else CPU_PATH


def _ask_plugin(plugin: importlib.metadata.EntryPoint) -> str | None:
    try:
        is_active = plugin.load()
    except ImportError as error:
        # A half-installed device stack must not keep the CPU from working.
        logger.warning(
            "platform plug-in %s cannot be imported and is skipped: %s", plugin.name, error
        )
        return None
    path = is_active()
    if path is not None and not isinstance(path, str):
        raise ConfigError(
            f"platform plug-in {plugin.name} returned {path!r}: it must return the dotted path of "
            "a platform class, or None."
        )
    return path


def load_platform(path: str) -> Platform:
    """Import and build a platform class.

    Raises:
        ConfigError: ``path`` names no subclass of Platform.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        platform_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"platform class {path!r} cannot be imported: {error}.") from error
    if not (isinstance(platform_class, type) and issubclass(platform_class, Platform)):
        raise ConfigError(f"{path} is not a subclass of vllm.platforms.interface.Platform.")
    return platform_class()


def is_cuda_available() -> bool:
    """Whether torch can reach a GPU.

    A torch built for the CPU says so in its version, which saves importing it (1.4 s) in processes
    that never touch a tensor.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version.endswith("+cpu"):
        return False
    import torch  # noqa: PLC0415  (start-up, see above)

    return bool(torch.cuda.is_available())
