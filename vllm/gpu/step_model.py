"""What runs a loaded model's steps on a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch

from vllm.gpu.decode_graphs import (
    DecodeGraphs,
    EntryGraphs,
    GraphDevice,
    choose_shapes,
    choose_sizes,
)
from vllm.gpu.draws import draw_tokens
from vllm.logger import init_logger
from vllm.model_executor.layers.mapped_table import MappedTable
from vllm.model_executor.models.decoder.clamped_experts import ClampedExperts
from vllm.model_executor.models.decoder.config import AttentionShape
from vllm.model_executor.models.decoder.feed_forward import ExpertBank
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.model_executor.models.deepseek_v4.moe import DeepseekV4MoE
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.draft_states import DraftStates
from vllm.v1.attention.entry_tables import choose_limits
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.paged_tables import (
    PagedTablesBuilder,
    StepShape,
    count_split_bytes,
)
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
    drafts = _make_draft_states(model, layout, kv_caches)
    builder = _make_builder(model, layout, kv_caches, device, drafts)
    settle = None if drafts is None else drafts.settle
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
    max_rows: int = 0,
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
        max_rows: Most tokens that a step may have; 0: any number.
        shows_progress: Whether a bar is shown.
    """
    if not reads_pages(model, layout):
        settle = make_settle(model, device, layout, kv_caches)
        entry_steps = EntryGraphs(model, layout, kv_caches, sizes, max_tokens, device)
        entry_steps.capture(graphs, shows_progress=shows_progress)
        return StepModel(entry_steps, entry_steps.build_metadata, draw_tokens, settle)
    max_blocks = sum(_most_blocks(group, max_tokens, num_drafts) for group in layout.groups)
    drafts = _make_draft_states(model, layout, kv_caches)
    steps = DecodeGraphs(
        model,
        partial(_make_builder, model, layout, kv_caches, device, drafts),
        layout,
        kv_caches,
        choose_shapes(sizes, num_drafts, max_rows),
        max_blocks,
        device,
    )
    steps.capture(graphs, shows_progress=shows_progress)
    settle = None if drafts is None else drafts.settle
    return StepModel(steps, steps.build_metadata, draw_tokens, settle)


def can_replay(model: Any, layout: CacheLayout) -> bool:
    """Whether a model's decode steps can be captured: nothing in them waits for the device."""
    return (reads_pages(model, layout) or isinstance(model, DeepseekV4ForCausalLM)) and all(
        module.is_one_product for module in model.modules() if _has_experts(module)
    )


def _has_experts(module: Any) -> TypeGuard[ExpertBank | ClampedExperts | DeepseekV4MoE]:
    return isinstance(module, ExpertBank | ClampedExperts | DeepseekV4MoE)


def count_graphs(
    model: Any, max_requests: int, max_tokens: int, num_drafts: int = 0, max_rows: int = 0
) -> int:
    """Return how many graphs a model's decode steps take.

    Args:
        model: The model.
        max_requests: Of a step.
        max_tokens: Of a context.
        num_drafts: Most drafts of a request in a step.
        max_rows: Most tokens that a step may have; 0: any number.
    """
    sizes = choose_sizes(max_requests)
    if isinstance(model, DeepseekV4ForCausalLM):
        return len(sizes) * len(choose_limits(max_tokens))
    return len(choose_shapes(sizes, num_drafts, max_rows))


def count_draft_bytes(model: Any, max_requests: int, num_drafts: int) -> int:
    """Return what steps with drafts hold beside what the largest step takes.

    That is what is kept of drafts until they are settled, and parts of split contexts, in a memory
    that graphs have for themselves.

    Args:
        model: The model.
        max_requests: Of a step.
        num_drafts: Most drafts of a request in a step.
    """
    if not num_drafts or not isinstance(model, DecoderForCausalLM):
        return 0
    config = model.config.for_ranks(model.share.size)
    shapes = [config.shape_of(layer) for layer in config.layers if layer.recurrence is None]
    widths = [
        shape.num_heads * (shape.head_dim if shape.latent is None else shape.latent.latent_dim)
        for shape in shapes
    ]
    num_rows = max_requests * (num_drafts + 1)
    shape = StepShape(num_drafts + 1, num_rows, max_requests)
    count = count_split_bytes(shape, max(widths, default=0))
    for plan in config.recurrences:
        values = plan.num_channels + plan.num_decays + plan.num_value_heads
        count += max_requests * num_drafts * values * torch.float32.itemsize
    return count


def reads_pages(model: Any, layout: CacheLayout) -> bool:
    """Whether kernels that read pages run this model."""
    return (
        isinstance(model, DecoderForCausalLM)
        and all(group.kind in ("keys", "recurrent") for group in layout.groups)
        # No kernel chooses keys.
        and all(_attends_to_all(model.config.shape_of(layer)) for layer in model.config.layers)
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


def _most_blocks(group: GroupLayout, max_tokens: int, num_drafts: int) -> int:
    """Returns the block ids that a request may have in a decode step's tables."""
    if group.state is not None:
        # The state that it begins with, and those that it leaves.
        num_left = StepShape(num_drafts + 1, 0, 1).count_stores(group.block_size)
        return (1 + num_left) * group.state.num_blocks
    # A window's table may hold a block more at both ends while it moves.
    return cdiv(max_tokens + num_drafts, group.block_size) + 2


def _make_draft_states(
    model: DecoderForCausalLM, layout: CacheLayout, kv_caches: Mapping[str, torch.Tensor]
) -> DraftStates | None:
    """Returns what keeps drafts until they are settled; None: the model has no states."""
    for group_id, group in enumerate(layout.groups):
        if group.state is not None:
            plan = model.config.for_ranks(model.share.size).recurrences[0]
            pages = next(kv_caches[n] for n, owner in layout.group_of.items() if owner == group_id)
            return DraftStates(group, group_id, pages, plan.num_decays)
    return None


def _make_builder(
    model: DecoderForCausalLM,
    layout: CacheLayout,
    kv_caches: Mapping[str, torch.Tensor],
    device: torch.device,
    drafts: DraftStates | None,
) -> PagedTablesBuilder:
    config = model.config.for_ranks(model.share.size)
    shapes = [config.shape_of(layer) for layer in config.layers if layer.recurrence is None]
    # Tiles are cut once for all layers.
    group_size = max((shape.num_heads // shape.num_kv_heads for shape in shapes), default=1)
    width = max((shape.head_dim for shape in shapes), default=1)
    return PagedTablesBuilder(layout, kv_caches, group_size, width, device, drafts)
