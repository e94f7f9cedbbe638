"""What runs a loaded model's steps on a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch

from vllm.gpu.decode_graphs import (
    DecodeGraphs,
    DraftingBlock,
    GraphDevice,
    choose_shapes,
    choose_sizes,
)
from vllm.gpu.draws import draw_tokens
from vllm.gpu.entry_graphs import BlockPlan, EntryGraphs, Settling, StepSizes, block_layout
from vllm.gpu.settle_graphs import SettleGraphs
from vllm.logger import init_logger
from vllm.model_executor.layers.mapped_table import MappedTable
from vllm.model_executor.models.decoder.clamped_experts import ClampedExperts
from vllm.model_executor.models.decoder.config import AttentionShape
from vllm.model_executor.models.decoder.feed_forward import ExpertBank
from vllm.model_executor.models.decoder.kv_cache import drafter_cache_names, state_shape
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.model_executor.models.deepseek_v4.moe import DeepseekV4MoE
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.draft_states import DraftStates, count_kept_bytes
from vllm.v1.attention.entry_tables import choose_reaches
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.paged_tables import (
    PagedTablesBuilder,
    StepShape,
    count_split_bytes,
)
from vllm.v1.attention.recurrent_tables import count_stores
from vllm.v1.attention.step_batch import MAX_DECODE_QUERIES
from vllm.v1.attention.step_model import (
    StepModel,
    TablesBuilder,
    make_settle,
    make_torch_step_model,
)
from vllm.v1.attention.step_tables import RequestSlice

logger = init_logger(__name__)

# How many times more requests the next larger graph has that settles drafts.
_SETTLED_STEP = 4


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
    settle = None if drafts is None else drafts.settle
    make = partial(_make_builder, model, kv_caches=kv_caches, device=device)
    builder: TablesBuilder = make(layout, drafts=drafts)
    own = find_block_layout(model, layout)
    if own is not None:
        builder = _Builders(builder, layout, make(own, drafts=None))
    return StepModel(model, builder, draw_tokens, settle, runs_drafter=own is not None)


@dataclass(frozen=True, slots=True)
class _Builders:
    """Builds tables of a model and of its block that drafts; a ``TablesBuilder``."""

    main: TablesBuilder
    layout: CacheLayout
    block: TablesBuilder

    def __call__(self, slices: Sequence[RequestSlice], layout: CacheLayout) -> Any:
        """Return the tables of whichever has these caches."""
        return (self.main if layout is self.layout else self.block)(slices, layout)


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
        has_block: Whether the model's own block makes them.
        max_rows: Most tokens that a step may have; 0: any number.
        shows_progress: Whether a bar is shown.
    """
    if not reads_pages(model, layout):
        queries, block_queries = _choose_queries(num_drafts, has_block=has_block)
        plan = None
        if block_queries:
            block_sizes = StepSizes(sizes, block_queries, max_tokens)
            plan = _plan_block(model, layout, block_sizes)
        settles = make_settle(model, device, layout, kv_caches)
        kept = _make_draft_states(model, layout, kv_caches) if num_drafts else None
        settled = None
        if settles is not None and kept is not None:
            # Steps with more drafts are not replayed.
            replayed = SettleGraphs(kept, _choose_settled(sizes), max(queries) - 1, device)
            settled = Settling(kept, replayed, settles)
        step_sizes = StepSizes(sizes, queries, max_tokens)
        entry_steps = EntryGraphs(model, layout, kv_caches, step_sizes, device, plan, settled)
        entry_steps.capture(graphs, shows_progress=shows_progress)
        return StepModel(
            entry_steps,
            entry_steps.build_metadata,
            draw_tokens,
            settles if settled is None else entry_steps.settle_drafts,
            runs_drafter=plan is not None,
        )
    max_blocks = sum(_most_blocks(group, max_tokens, num_drafts) for group in layout.groups)
    shapes = choose_shapes(sizes, num_drafts, max_rows)
    drafts = _make_draft_states(model, layout, kv_caches)
    make = partial(_make_builder, model, kv_caches=kv_caches, device=device)
    own = find_block_layout(model, layout) if has_block else None
    block = None
    if own is not None:
        block = DraftingBlock(
            partial(make, own, drafts=None),
            own,
            _choose_block_shapes(shapes, num_drafts),
            model.config.hidden_size,
            model.dtype,
        )
    settling = None
    if drafts is not None and num_drafts:
        settling = SettleGraphs(drafts, _choose_settled(sizes), num_drafts, device)
    steps = DecodeGraphs(
        model,
        partial(make, layout, drafts=drafts),
        layout,
        kv_caches,
        shapes,
        max_blocks,
        device,
        block,
        settling,
    )
    steps.capture(graphs, shows_progress=shows_progress)
    # Without drafts there is nothing to settle.
    settle = settling if settling is not None or drafts is None else drafts.settle
    return StepModel(steps, steps.build_metadata, draw_tokens, settle, runs_drafter=own is not None)


def _plan_block(model: Any, layout: CacheLayout, sizes: StepSizes) -> BlockPlan:
    """Returns what of a block that drafts is captured."""
    config = model.config
    if isinstance(model, DeepseekV4ForCausalLM):
        shape = config.hc_mult, config.hidden_size
        return BlockPlan(block_layout(layout), sizes, shape, model.norm.dtype)
    own = block_layout(layout, drafter_cache_names(config))
    return BlockPlan(own, sizes, (config.hidden_size,), model.dtype)


def _choose_block_shapes(shapes: Sequence[StepShape], num_drafts: int) -> list[StepShape]:
    """Returns the shapes of a drafting block's steps, of those of its model.

    It drafts once behind the rows that stand, then row by row.
    """
    return [shape for shape in shapes if num_drafts > 1 or shape.most_tokens > 1]


def _choose_settled(sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of requests by which drafts are settled: padding costs little there."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or _SETTLED_STEP * size <= kept[-1]:
            kept.append(size)
    return kept


def find_block_layout(model: DecoderForCausalLM, layout: CacheLayout) -> CacheLayout | None:
    """Return the group of the block that drafts, as its proposer has it.

    None: there is no such block, or it does not read pages itself.
    """
    config = model.config
    if model.drafter is None or config.drafter is None:
        return None
    if not _attends_to_all(config.shape_of(config.drafter)):
        return None
    (name,) = drafter_cache_names(config)
    groups = (layout.groups[layout.group_of[name]],)
    return replace(layout, groups=groups, group_of={name: 0})


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


def _choose_queries(num_drafts: int, *, has_block: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens of a request that steps of a model with entries are captured for.

    Returns:
        Those of the model's steps, and of its own block's.
    """
    if not num_drafts:
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
    max_rows: int = 0,
) -> int:
    """Return how many graphs a model's decode steps take.

    Args:
        model: The model.
        max_requests: Of a step.
        max_tokens: Of a context.
        num_drafts: Most drafts of a request in a step.
        has_block: Whether the model's own block makes them.
        max_rows: Most tokens that a step may have; 0: any number.
    """
    sizes = choose_sizes(max_requests)
    if isinstance(model, DeepseekV4ForCausalLM) or _chooses_keys(model):
        queries, block_queries = _choose_queries(num_drafts, has_block=has_block)
        num_reaches = len(choose_reaches(sizes, max_tokens))
        # DeepSeek-V4's block has a window alone, and states there are none.
        is_v4 = isinstance(model, DeepseekV4ForCausalLM)
        num_of_block, num_settled = (
            (len(sizes), 0) if is_v4 else (num_reaches, len(_choose_settled(sizes)))
        )
        count = len(queries) * num_reaches + len(block_queries) * num_of_block
        return count + (num_settled if num_drafts else 0)
    shapes = choose_shapes(sizes, num_drafts, max_rows)
    count = len(shapes)
    if has_block:
        count += len(_choose_block_shapes(shapes, num_drafts))
    if num_drafts and isinstance(model, DecoderForCausalLM) and model.config.recurrences:
        count += len(_choose_settled(sizes))
    return count


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
    # Where keys are chosen no context is split.
    width = 0 if _chooses_keys(model) else max(widths, default=0)
    count = count_split_bytes(shape, width)
    if config.recurrences:
        num_decays = config.recurrences[0].num_decays
        count += count_kept_bytes(state_shape(config), num_decays, max_requests * num_drafts)
    return count


def count_gathered_bytes(
    model: Any, max_requests: int, max_tokens: int, num_drafts: int = 0
) -> int:
    """Return what the largest captured step gathers at a time of a layer that chooses keys.

    That is what it chooses by, of the whole context of every request, or the rows that every query
    chose; graphs hold it in a memory that they have for themselves.

    Args:
        model: The model.
        max_requests: Of a step.
        max_tokens: Of a context.
        num_drafts: Most drafts of a request in a step.
    """
    if isinstance(model, DeepseekV4ForCausalLM):
        config, itemsize = model.config, model.norm.dtype.itemsize
        ratios = [layer.ratio for layer in config.layers if layer.kind == "csa"]
        if not ratios:
            return 0
        tokens_of_key, key_bytes = min(ratios), config.index_head_dim * itemsize
        by_query = config.index_topk * config.head_dim * itemsize
    elif _chooses_keys(model):
        shapes = map(model.config.shape_of, model.config.layers)
        latent = next(s.latent for s in shapes if not _attends_to_all(s))
        indexer = latent.indexer
        tokens_of_key = indexer.pool_size
        key_bytes = indexer.head_dim * torch.float32.itemsize
        num_rows = (1 + indexer.num_chosen) * indexer.pool_size
        by_query = num_rows * (latent.latent_dim + latent.shared_dim) * model.dtype.itemsize
    else:
        return 0
    queries, _ = _choose_queries(num_drafts, has_block=False)
    reaches = choose_reaches(choose_sizes(max_requests), max_tokens)
    most_keys = max(size * (limit // tokens_of_key) for size, limit in reaches)
    return max(most_keys * key_bytes, max_requests * max(queries) * by_query)


def reads_pages(model: Any, layout: CacheLayout) -> bool:
    """Whether kernels that read pages run this model."""
    return (
        isinstance(model, DecoderForCausalLM)
        and all(group.kind in ("keys", "recurrent") for group in layout.groups)
        # No kernel chooses keys, or sees those behind a query.
        and not _chooses_keys(model)
        and not model.config.sees_both_ways
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


def _most_blocks(group: GroupLayout, max_tokens: int, num_drafts: int) -> int:
    """Returns the block ids that a request may have in a decode step's tables."""
    if group.state is not None:
        # The state that it begins with, and those that it leaves.
        return (1 + count_stores(num_drafts + 1, group.block_size)) * group.state.num_blocks
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
    *,
    kv_caches: Mapping[str, torch.Tensor],
    device: torch.device,
    drafts: DraftStates | None,
) -> PagedTablesBuilder:
    config = model.config.for_ranks(model.share.size)
    layers = [layer for layer in config.layers if layer.recurrence is None]
    if model.drafter is not None and model.config.drafter is not None:
        layers.append(model.config.drafter)
    # Tiles are cut once for all layers.
    shapes = [config.shape_of(layer) for layer in layers]
    group_size = max((shape.num_heads // shape.num_kv_heads for shape in shapes), default=1)
    width = max((shape.head_dim for shape in shapes), default=1)
    return PagedTablesBuilder(layout, kv_caches, group_size, width, device, drafts)
