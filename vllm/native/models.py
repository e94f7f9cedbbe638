"""Which loaded models run on the native kernels."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.model_executor.models.deepseek_v41.model import DeepseekV41ForCausalLM
from vllm.native.decoder import NativeDecoder, can_run_decoder
from vllm.native.deepseek_v4 import NativeDeepseekV4, can_run_latent_model
from vllm.native.deepseek_v41 import NativeDeepseekV41
from vllm.native.library import NativeContext
from vllm.native.loader import load_library, open_library
from vllm.native.sampling import draw_tokens, forbid_tokens
from vllm.native.step_tables import build_native_tables
from vllm.v1.attention.metadata import CacheLayout
from vllm.v1.attention.step_model import StepModel

logger = init_logger(__name__)

_LATENT_MODELS: dict[type, Callable[..., Any]] = {
    DeepseekV4ForCausalLM: NativeDeepseekV4,
    DeepseekV41ForCausalLM: NativeDeepseekV41,
}


def make_native_model(
    model: Any,
    layout: CacheLayout,
    kv_caches: Mapping[str, torch.Tensor],
    num_threads: int,
    *,
    releases: bool = False,
) -> StepModel | None:
    """Returns what runs a loaded model's steps natively; None: torch runs them.

    Args:
        model: The loaded model.
        layout: Its KV groups.
        kv_caches: Cache name -> view.
        num_threads: Threads that compute.
        releases: Whether weights that are packed are given back; the torch model then has none.

    Raises:
        ConfigError: VLLM_NATIVE is no boolean.
    """
    reason = _find_obstacle(model, kv_caches)
    if reason:
        logger.info("native kernels: off (%s); torch runs the model", reason)
        return None
    library = load_library()
    assert library is not None, "_find_obstacle looked"
    context = NativeContext(library, num_threads, "amx-int8" if envs.VLLM_CPU_AMX_INT8 else None)
    logger.info("native kernels: %s build, %d threads", context.vector_build, num_threads)
    draw, forbid = partial(draw_tokens, context), partial(forbid_tokens, context)
    latent = _LATENT_MODELS.get(type(model))
    if latent is not None:
        own = latent(model, layout, kv_caches, context, releases=releases)
        return StepModel(own, build_native_tables, draw, forbid_tokens=forbid, has_same_bits=True)
    decoder = NativeDecoder(model, layout, kv_caches, context, releases=releases)
    settle = decoder.settle_drafts if model.config.recurrences else None
    return StepModel(
        decoder,
        build_native_tables,
        draw,
        settle,
        forbid,
        runs_drafter=True,
        takes_pictures=True,
        has_same_bits=True,
    )


def _find_obstacle(model: Any, kv_caches: Mapping[str, torch.Tensor]) -> str:
    if not envs.VLLM_NATIVE:
        return "VLLM_NATIVE=0"
    if isinstance(model, CausalLM) and model.share.size > 1:
        return "one of several workers"
    library = open_library()
    if isinstance(library, str):
        return library
    if type(model) in _LATENT_MODELS:
        takes = can_run_latent_model(model, kv_caches)
    elif isinstance(model, DecoderForCausalLM):
        takes = can_run_decoder(model, kv_caches)
    else:
        return f"none for {type(model).__name__}"
    return "" if takes else "none for this model's layers, quantised weights or cache types"
