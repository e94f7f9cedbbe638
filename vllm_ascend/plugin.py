"""The entry point of ``vllm.platform_plugins``: says whether this process runs on an NPU.

Loads nothing but the standard library unless torch_npu is installed or reference mode is asked for.
"""

import importlib
import importlib.util

from vllm.logger import init_logger
from vllm_ascend import envs

logger = init_logger(__name__)

NPU_PATH = "vllm_ascend.platform.NPUPlatform"
REFERENCE_PATH = "vllm_ascend.platform.ReferencePlatform"
_DEVICE_PACKAGE = "torch_npu"


def find_platform() -> str | None:
    """Return the dotted path of the platform class to use; None where there is no NPU.

    Raises:
        ConfigError: VLLM_ASCEND_REFERENCE is no boolean.
    """
    if envs.is_reference_mode():
        return REFERENCE_PATH
    if importlib.util.find_spec(_DEVICE_PACKAGE) is None:
        return None
    try:
        importlib.import_module(_DEVICE_PACKAGE)
    # torch wraps a back end that fails to load in a RuntimeError; the loader itself raises OSError.
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        logger.warning(
            "torch_npu is installed but cannot be imported, so NPUs are not used: %s. Install "
            "CANN and source its set_env.sh, or uninstall torch_npu (TORCH_DEVICE_BACKEND_AUTOLOAD"
            "=0 lets torch import without it).",
            reason,
        )
        return None
    return NPU_PATH
