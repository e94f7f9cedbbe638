"""The production engine core; the one module of the engine that imports an executor and torch."""

from typing import TYPE_CHECKING

from vllm import platforms
from vllm.config import VllmConfig

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def build_engine_core(vllm_config: VllmConfig) -> "EngineCore":
    """Make the engine core of this process, the platform's defaults filled in."""
    # Before anything imports torch: a plug-in may have to say how torch meets its device.
    config = platforms.current_platform.check_and_update_config(vllm_config)
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  (see above)
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415  (see above)

    return EngineCore(config, UniProcExecutor)
