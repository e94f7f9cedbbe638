"""What runs a loaded model's steps on a GPU."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from vllm.gpu.decode_graphs import DecodeGraphs, GraphDevice, choose_sizes
from vllm.logger import init_logger
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.paged_tables import PagedTablesBuilder
from vllm.v1.attention.step_model import StepModel, make_torch_step_model

logger = init_logger(__name__)


def make_gpu_step_model(
    model: Any, layout: CacheLayout, kv_caches: Mapping[str, torch.Tensor], device: torch.device
) -> StepModel:
    """Returns what runs a model's steps: kernels that read pages, or gathers and registry ops.

    Args:
        model: The loaded model, its ops Triton's.
        layout: Its KV groups.
        kv_caches: Cache name -> pages; the same in every step.
        device: Where it is.
    """
    if not reads_pages(model, layout):
        logger.info("GPU: rows of %s are gathered from pages", type(model).__name__)
        return make_torch_step_model(model, device, layout, kv_caches)
    return StepModel(model, _make_builder(model, layout, kv_caches, device))


def make_graphed_step_model(
    model: DecoderForCausalLM,
    layout: CacheLayout,
    kv_caches: Mapping[str, torch.Tensor],
    device: torch.device,
    graphs: GraphDevice,
    *,
    max_requests: int,
    max_tokens: int,
    shows_progress: bool = False,
) -> StepModel:
    """Returns what replays a model's decode steps, captured by now.

    Args:
        model: A model for which ``reads_pages``.
        layout: Its KV groups.
        kv_caches: Cache name -> pages; the same in every step.
        device: Where it is.
        graphs: Captures.
        max_requests: Of a step.
        max_tokens: Of a request.
        shows_progress: Whether a bar is shown.
    """
    # A window's table may hold a block more at both ends while it moves.
    max_blocks = sum(cdiv(max_tokens, group.block_size) + 2 for group in layout.groups)
    steps = DecodeGraphs(
        model,
        partial(_make_builder, model, layout, kv_caches, device),
        layout,
        kv_caches,
        choose_sizes(max_requests),
        max_blocks,
        device,
    )
    steps.capture(graphs, shows_progress=shows_progress)
    return StepModel(steps, steps.build_metadata)


def reads_pages(model: Any, layout: CacheLayout) -> bool:
    """Whether kernels that read pages run this model."""
    return (
        isinstance(model, DecoderForCausalLM)
        # Tiles are cut for one number of heads and one width.
        and all(layer.attention is None for layer in model.config.layers)
        and all(group.kind == "keys" for group in layout.groups)
    )


def _make_builder(
    model: DecoderForCausalLM,
    layout: CacheLayout,
    kv_caches: Mapping[str, torch.Tensor],
    device: torch.device,
) -> PagedTablesBuilder:
    shape = model.config.attention.for_ranks(model.share.size)
    return PagedTablesBuilder(layout, kv_caches, shape.num_heads // shape.num_kv_heads, device)
