"""What runs a loaded model's steps on a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch

from vllm.gpu.decode_graphs import DecodeGraphs, GraphDevice, choose_sizes
from vllm.gpu.draws import draw_tokens
from vllm.gpu.entry_graphs import EntryGraphs, StepSizes
from vllm.logger import init_logger
from vllm.model_executor.layers.mapped_table import MappedTable
from vllm.model_executor.models.decoder.clamped_experts import ClampedExperts
from vllm.model_executor.models.decoder.config import AttentionShape
from vllm.model_executor.models.decoder.feed_forward import ExpertBank
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.model_executor.models.deepseek_v4.moe import DeepseekV4MoE
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.entry_tables import choose_limits
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.paged_tables import PagedTablesBuilder
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES
from vllm.v1.attention.step_model import StepModel, make_settle, make_torch_step_model

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
        steps = make_torch_step_model(model, device, layout, kv_caches)
        return replace(steps, draw_tokens=draw_tokens)
    builder = _make_builder(model, layout, kv_caches, device)
    settle = make_settle(model, device, layout, kv_caches)
    return StepModel(model, builder, draw_tokens, settle)


def make_graphed_step_model(
    model: Any,
    layout: CacheLayout,
    kv_caches: Mapping[str, torch.Tensor],
    device: torch.device,
    graphs: GraphDevice,
    *,
    sizes: Sequence[int],
    max_tokens: int,
    num_drafts: int = 0,
    has_block: bool = False,
    shows_progress: bool = False,
) -> StepModel:
    """Returns what replays a model's decode steps, captured by now.

    Args:
        model: A model for which ``can_replay``.
        layout: Its KV groups.
        kv_caches: Cache name -> pages; the same in every step.
        device: Where it is.
        graphs: Captures.
        sizes: Batch sizes to capture.
        max_tokens: Of a request.
        num_drafts: Most drafts of a request in a step.
        has_block: Whether the model's own block makes them.
        shows_progress: Whether a bar is shown.
    """
    settle = make_settle(model, device, layout, kv_caches)
    if not reads_pages(model, layout):
        queries, block_queries = _choose_queries(model, num_drafts, has_block=has_block)
        step_sizes = StepSizes(sizes, queries, block_queries, max_tokens)
        entry_steps = EntryGraphs(model, layout, kv_caches, step_sizes, device)
        entry_steps.capture(graphs, shows_progress=shows_progress)
        return StepModel(entry_steps, entry_steps.build_metadata, draw_tokens, settle)
    max_blocks = sum(_most_blocks(group, max_tokens) for group in layout.groups)
    steps = DecodeGraphs(
        model,
        partial(_make_builder, model, layout, kv_caches, device),
        layout,
        kv_caches,
        sizes,
        max_blocks,
        device,
    )
    steps.capture(graphs, shows_progress=shows_progress)
    return StepModel(steps, steps.build_metadata, draw_tokens, settle)


def can_replay(model: Any, layout: CacheLayout) -> bool:
    """Whether a model's decode steps can be captured: nothing in them waits for the device."""
    is_known = reads_pages(model, layout) or isinstance(model, DeepseekV4ForCausalLM)
    # Where keys are chosen, they are chosen of all.
    is_known = is_known or (
        _chooses_keys(model)
        and not any(group.kind == "keys" and group.window for group in layout.groups)
    )
    return is_known and all(
        module.is_one_product for module in model.modules() if _has_experts(module)
    )


def _has_experts(module: Any) -> TypeGuard[ExpertBank | ClampedExperts | DeepseekV4MoE]:
    return isinstance(module, ExpertBank | ClampedExperts | DeepseekV4MoE)


def _choose_queries(
    model: Any, num_drafts: int, *, has_block: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens of a request that steps of a model with entries are captured for.

    Returns:
        Those of the model's steps, and of its own block's.
    """
    if not num_drafts or not isinstance(model, DeepseekV4ForCausalLM):
        return (1,), ()
    most = min(1 + num_drafts, MAX_DECODE_QUERIES)
    if not has_block:
        # Where nothing is found to draft, steps have a token of each request.
        return (1, most), ()
    # A block drafts in every step: it runs the rows that stand, then one for each further draft.
    return (most,), ((most,) if num_drafts == 1 else (1, most))


def count_graphs(
    model: Any,
    max_requests: int,
    max_tokens: int,
    num_drafts: int = 0,
    *,
    has_block: bool = False,
) -> int:
    """Return how many graphs a model's decode steps take.

    Args:
        model: The model.
        max_requests: Of a step.
        max_tokens: Of a context.
        num_drafts: Most drafts of a request in a step.
        has_block: Whether the model's own block makes them.
    """
    count = len(choose_sizes(max_requests))
    if isinstance(model, DeepseekV4ForCausalLM) or _chooses_keys(model):
        queries, block_queries = _choose_queries(model, num_drafts, has_block=has_block)
        count *= len(choose_limits(max_tokens)) * len(queries) + len(block_queries)
    return count


def reads_pages(model: Any, layout: CacheLayout) -> bool:
    """Whether kernels that read pages run this model."""
    return (
        isinstance(model, DecoderForCausalLM)
        and all(group.kind in ("keys", "recurrent") for group in layout.groups)
        # No kernel chooses keys.
        and not _chooses_keys(model)
    )


def _chooses_keys(model: Any) -> bool:
    return isinstance(model, DecoderForCausalLM) and not all(
        _attends_to_all(model.config.shape_of(layer)) for layer in model.config.layers
    )


def _attends_to_all(shape: AttentionShape) -> bool:
    return shape.latent is None or shape.latent.indexer is None


def move_tables(model: Any) -> None:
    """Moves tables that a loader left mapped in their files to the device.

    On the host they would have every step wait for its token ids.
    """
    for module in model.modules():
        if isinstance(module, MappedTable):
            module.move_to_device()


def stack_experts(model: Any) -> None:
    """Moves each layer's stored experts into stacks: one product then takes all that were chosen.

    One by one they would have every step wait for the choice. A layer's experts are there twice
    while they are moved.
    """
    for module in model.modules():
        if _has_experts(module):
            module.stack_stored()


def _most_blocks(group: GroupLayout, max_tokens: int) -> int:
    """Returns the block ids that a request may have in a decode step's tables."""
    if group.state is not None:
        # The state that it begins with, and the one that it leaves.
        return 2 * group.state.num_blocks
    # A window's table may hold a block more at both ends while it moves.
    return cdiv(max_tokens, group.block_size) + 2


def _make_builder(
    model: DecoderForCausalLM,
    layout: CacheLayout,
    kv_caches: Mapping[str, torch.Tensor],
    device: torch.device,
) -> PagedTablesBuilder:
    config = model.config.for_ranks(model.share.size)
    shapes = [config.shape_of(layer) for layer in config.layers if layer.recurrence is None]
    # Tiles are cut once for all layers.
    group_size = max((shape.num_heads // shape.num_kv_heads for shape in shapes), default=1)
    width = max((shape.head_dim for shape in shapes), default=1)
    return PagedTablesBuilder(layout, kv_caches, group_size, width, device)
