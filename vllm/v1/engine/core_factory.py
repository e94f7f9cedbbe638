"""The production engine core; the one module of the engine that imports an executor and torch."""

from vllm import platforms
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor


def build_engine_core(vllm_config: VllmConfig) -> EngineCore:
    """Make the engine core of this process, the platform's defaults filled in."""
    config = platforms.current_platform.check_and_update_config(vllm_config)
    return EngineCore(config, UniProcExecutor)
