"""The production engine core: the one module of the engine that imports an executor, hence torch."""

from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor


def build_engine_core(
    vllm_config: VllmConfig, on_progress: Callable[[], None]
) -> tuple[EngineCore, float]:
    """Make the engine core of this process.

    Args:
        vllm_config: What to build.
        on_progress: Called whenever a step gets on.

    Returns:
        The core, and the seconds its model took to load.
    """
    core = EngineCore(vllm_config, UniProcExecutor)
    return core, core.load_s
