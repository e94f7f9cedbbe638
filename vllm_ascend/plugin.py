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
        return None
    return NPU_PATH
