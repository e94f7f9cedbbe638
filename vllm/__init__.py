"""An inference server for hybrid-attention models; not the vllm-project's engine.

The names below load on first use: importing ``vllm`` itself costs milliseconds and pulls in neither
torch nor pydantic.
"""

import importlib
from typing import TYPE_CHECKING

from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from vllm.v1.engine.engine_args import AsyncEngineArgs, EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# Public name -> (module, its name there).
_LAZY = {
    "LLM": ("vllm.entrypoints.llm", "LLM"),
    "AsyncEngineArgs": ("vllm.v1.engine.engine_args", "AsyncEngineArgs"),
    "AsyncLLMEngine": ("vllm.v1.engine.async_llm", "AsyncLLM"),
    "CompletionOutput": ("vllm.outputs", "CompletionOutput"),
    "EngineArgs": ("vllm.v1.engine.engine_args", "EngineArgs"),
    "LLMEngine": ("vllm.v1.engine.llm_engine", "LLMEngine"),
    "PromptType": ("vllm.inputs", "PromptType"),
    "RequestOutput": ("vllm.outputs", "RequestOutput"),
    "SamplingParams": ("vllm.sampling_params", "SamplingParams"),
    "TextPrompt": ("vllm.inputs", "TextPrompt"),
    "TokensPrompt": ("vllm.inputs", "TokensPrompt"),
}


def __getattr__(name: str) -> object:
    try:
        module, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
