"""The entry point of ``vllm.platform_plugins``: says whether this process runs on an NPU.

Loads nothing but the standard library unless torch_npu is installed or reference mode is asked for.
"""

import importlib
import importlib.util
import os

from vllm.logger import init_logger
from vllm_ascend import envs

logger = init_logger(__name__)

NPU_PATH = "vllm_ascend.platform.NPUPlatform"
REFERENCE_PATH = "vllm_ascend.platform.ReferencePlatform"
_DEVICE_PACKAGE = "torch_npu"
# For the processes that this one starts: what they would find is known.
_UNUSABLE = "_VLLM_ASCEND_TORCH_NPU_UNUSABLE"
_TOLD = "_VLLM_ASCEND_IDLE_VARIABLES_TOLD"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def find_platform() -> str | None:
    """Return the dotted path of the platform class to use; None where there is no NPU.

    Where torch_npu is installed, torch is told not to load it by itself: a torch_npu that cannot
    be loaded would keep ``import torch`` from working, in this process and in those it starts.

    Raises:
        ConfigError: VLLM_ASCEND_REFERENCE is no boolean.
    """
    is_installed = importlib.util.find_spec(_DEVICE_PACKAGE) is not None
    if is_installed:
        os.environ[_AUTOLOAD] = "0"
    if envs.is_reference_mode():
        return REFERENCE_PATH
    if not is_installed:
        _tell_idle_variables()
        return None
    if os.environ.get(_UNUSABLE):
        return None  # tried, and said, by this process or the one that started it
    try:
        importlib.import_module(_DEVICE_PACKAGE)
    # torch wraps a back end that fails to load in a RuntimeError; the loader itself raises OSError.
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        logger.warning(
            "torch_npu is installed but cannot be imported, so NPUs are not used: %s. Install "
            "CANN and source its set_env.sh, or uninstall torch_npu.",
            reason,
        )
        os.environ[_UNUSABLE] = "1"
        _tell_idle_variables()
        return None
    return NPU_PATH


def _tell_idle_variables() -> None:
    """Warn of what was set for an NPU and has no effect without one, once for all processes."""
    names = [name for name in envs.DEVICE_VARIABLES if os.environ.get(name)]
    if names and not os.environ.get(_TOLD):
        os.environ[_TOLD] = "1"
        logger.warning(
            "No NPU is used, so %s has no effect (%s=1 runs the Ascend tree on the CPU).",
            ", ".join(f"{name}={os.environ[name]}" for name in names),
            envs.REFERENCE_VARIABLE,
        )
