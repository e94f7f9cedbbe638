"""Drives a DeepSeek-V4 model over paged caches the way a worker does, with hostile pages.

* Window groups are private: a step stores only the blocks that hold rows needed after it.
* Every page that is not written, freed or null holds NaN: a wrong read shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.kv_cache import deepseek_v4_kv_cache_specs
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.native.models import make_native_model
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.metadata import BlockTableView, RequestSlice
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op
from vllm.v1.attention.step_model import make_torch_step_model
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

SpecFunction = Callable[[Any, int, torch.dtype, torch.dtype], dict[str, KVCacheSpec]]


def build_model(
    config: DeepseekV4Config,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    ops: OpResolver = get_reference_op,
) -> DeepseekV4ForCausalLM:
    """Builds our model and fills every slot; the names must match exactly."""
    model = DeepseekV4ForCausalLM(config, ops=ops, dtype=dtype, device="cpu")
    slots = model.weight_slots()
    assert set(slots) == set(tensors), set(slots) ^ set(tensors)
    with torch.no_grad():
        for name, slot in slots.items():
            assert slot.shape == tensors[name].shape, name
            slot.copy_(tensors[name])
    return model


def build_kv_cache_config(specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """Groups caches by geometry; the windows are split in two, as the real grouping may."""
    groups: dict[tuple[object, ...], list[str]] = {}
    num_windows = 0
    for name, spec in specs.items():
        half = 0
        if name.endswith(".window"):
            half, num_windows = num_windows % 2, num_windows + 1
        ratios = (getattr(spec, "compress_ratio", None), getattr(spec, "state_ratio", None))
        window = getattr(spec, "sliding_window", None)
        key = (type(spec), spec.block_size, window, *ratios, half)
        groups.setdefault(key, []).append(name)
    return KVCacheConfig(
        num_blocks=0,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, specs[names[0]]) for names in groups.values()],
    )


def find_poison(dtype: torch.dtype) -> float:
    """Returns what no read may meet: no number, or in bytes what makes a scale of such."""
    return -1 if dtype == torch.int8 else float("nan")


def is_poisoned(pages: torch.Tensor) -> bool:
    """Whether nothing was written."""
    return bool((pages == -1).all() if pages.dtype == torch.int8 else pages.isnan().all())


@dataclass
class Request:
    """One request: its tokens, how many are computed, its blocks by group, its steps' bounds.

    It may keep the recurrent states of all units that a step ends.
    """

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[dict[int, int]] = field(default_factory=list)
    write_from: tuple[int, ...] = ()
    read_from: int = 0
    wanted_from: int = 0
    output_from: int = 0
    keeps_states: bool = False

    @property
    def num_left(self) -> int:
        """Tokens not computed yet."""
        return len(self.token_ids) - self.num_computed


class PagedHarness:
    """Owns pages and block tables; runs steps.

    Args:
        model: The model.
        block_size: ``--block-size``.
        num_blocks: Blocks of each group.
        cache_dtype: Type of window and entry caches.
        packed: Make the caches strided views over one pool, as the packed pool does.
        find_specs: The model's cache specs.
        native: Run the steps by the native kernels with so many threads; 0: by torch.
    """

    def __init__(
        self,
        model: Any,
        block_size: int = 32,
        num_blocks: int = 160,
        cache_dtype: torch.dtype = torch.float32,
        packed: bool = False,
        find_specs: SpecFunction = deepseek_v4_kv_cache_specs,
        native: int = 0,
    ) -> None:
        self.model = model
        specs = find_specs(model.config, block_size, cache_dtype, torch.float32)
        kv_cache_config = build_kv_cache_config(specs)
        self.layout = CacheLayout.from_kv_cache_config(kv_cache_config)
        self.kv_caches = {
            name: self._make_pages(name, spec, num_blocks, packed) for name, spec in specs.items()
        }
        self._free = [list(range(num_blocks - 1, 0, -1)) for _ in self.layout.groups]
        self.steps = make_torch_step_model(model, torch.device("cpu"), self.layout, self.kv_caches)
        if native:
            found = make_native_model(model, self.layout, self.kv_caches, native)
            assert found is not None, "the library is not built or the model has no kernels"
            self.steps = found

    def _make_pages(
        self, name: str, spec: KVCacheSpec, num_blocks: int, packed: bool
    ) -> torch.Tensor:
        page = spec.page_layout()
        shape = (num_blocks, page.rows, page.width)
        gap = 24 if packed else 0
        num_values = page.rows * page.width
        pool = torch.full((num_blocks, num_values + gap), find_poison(page.dtype), dtype=page.dtype)
        pages = pool[:, gap // 2 : gap // 2 + num_values]
        return pages.view(shape)

    def add(self, token_ids: list[int]) -> Request:
        """Adds a request."""
        return Request(token_ids, 0, [{} for _ in self.layout.groups])

    def step(
        self, work: Sequence[tuple[Request, int]], num_rejected: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """Runs (request, tokens) pairs in one batch.

        Args:
            work: The requests and how many tokens of each.
            num_rejected: By request, how many of its last rows hold wrong drafts: other tokens
                than the request's, and not computed afterwards. Empty: none.

        Returns:
            fp32 logits [tokens, V] of each request.
        """
        rejected = num_rejected or [0] * len(work)
        # What the last step left dead goes now, not then: an MTP block may have run in between.
        for sequence, _ in work:
            self._free_dead(sequence)
        slices = [
            self.find_slice(sequence, count, num_wrong)
            for (sequence, count), num_wrong in zip(work, rejected, strict=True)
        ]
        meta = self.steps.build_metadata(slices, self.layout)
        token_ids: list[int] = []
        positions: list[int] = []
        for (sequence, count), num_wrong in zip(work, rejected, strict=True):
            start = sequence.num_computed
            end = start + count
            token_ids += sequence.token_ids[start : end - num_wrong]
            wrong = sequence.token_ids[end - num_wrong : end]
            token_ids += [(token_id + 1) % self.model.config.vocab_size for token_id in wrong]
            positions += range(start, end)
        with torch.inference_mode():
            streams = self.steps.model(
                torch.tensor(token_ids, dtype=torch.long),
                torch.tensor(positions, dtype=torch.long),
                meta,
                self.kv_caches,
            )
            logits = self.steps.model.compute_logits(streams)
        if self.steps.settle_drafts is not None:
            stand = [
                item.num_drafts - num_wrong
                for item, num_wrong in zip(slices, rejected, strict=True)
            ]
            with torch.inference_mode():
                self.steps.settle_drafts(slices, stand)
        for (sequence, count), num_wrong in zip(work, rejected, strict=True):
            sequence.num_computed += count - num_wrong
        self.last_streams, self.last_meta, self.last_slices = streams, meta, slices
        assert all(is_poisoned(pages[0]) for pages in self.kv_caches.values())
        return list(torch.split(logits, [count for _, count in work]))

    def run(self, token_ids: list[int], chunks: Sequence[int]) -> torch.Tensor:
        """Runs one request chunk by chunk; returns all its logits."""
        sequence = self.add(token_ids)
        logits = [self.step([(sequence, count)])[0] for count in chunks]
        self.release(sequence)
        return torch.cat(logits)

    def release(self, sequence: Request) -> None:
        """Frees all blocks of a request."""
        for group_id in range(len(self.layout.groups)):
            for index in list(sequence.blocks[group_id]):
                self._free_block(sequence, group_id, index)

    def find_slice(self, sequence: Request, count: int, num_rejected: int = 0) -> RequestSlice:
        """Takes the blocks of the next ``count`` tokens; returns the request's slice.

        What must be left when the last ``num_rejected`` tokens turn out wrong is kept as well.
        """
        start, end = sequence.num_computed, sequence.num_computed + count
        tables = []
        for group_id, group in enumerate(self.layout.groups):
            held = sequence.blocks[group_id]
            kept = start + 1 if sequence.keeps_states else end - num_rejected
            for index in _blocks_kept(group, kept, end):
                if index not in held:
                    held[index] = self._free[group_id].pop()
            tables.append(_to_table(held))
        return RequestSlice(
            start,
            count,
            tuple(tables),
            sequence.write_from,
            sequence.read_from,
            sequence.wanted_from,
            # More of them than turn out wrong, where there are so many tokens.
            min(count - 1, num_rejected + count % 3) if num_rejected else 0,
            sequence.output_from,
            self._find_previous(sequence),
        )

    def _find_previous(self, sequence: Request) -> list[int] | None:
        count = self.model.num_previous_tokens
        before = sequence.token_ids[: sequence.num_computed][-count:] if count else []
        return [-1] * (count - len(before)) + before if count else None

    def forget_windows(self, sequence: Request) -> None:
        """Loses all that is not dense, as when a prefix's checkpoint is evicted."""
        for group_id, group in enumerate(self.layout.groups):
            if not is_dense(group):
                for index in list(sequence.blocks[group_id]):
                    self._free_block(sequence, group_id, index)

    def read_rows(self, sequence: Request, name: str, positions: range) -> torch.Tensor:
        """Returns the stored rows [len(positions), width] of a window or state cache."""
        group_id = self.layout.group_of[name]
        size = self.layout.groups[group_id].block_size
        held = sequence.blocks[group_id]
        rows = [self.kv_caches[name][held[p // size], p % size] for p in positions]
        return torch.stack(rows)

    def _free_dead(self, sequence: Request) -> None:
        for group_id, group in enumerate(self.layout.groups):
            end = sequence.num_computed
            if is_dense(group):
                # What is there beyond is not written again.
                end = max(end, *sequence.write_from, 0)
            kept = set(_blocks_kept(group, sequence.num_computed, end))
            for index in list(sequence.blocks[group_id]):
                if index not in kept:
                    self._free_block(sequence, group_id, index)

    def _free_block(self, sequence: Request, group_id: int, index: int) -> None:
        block = sequence.blocks[group_id].pop(index)
        for name, owner in self.layout.group_of.items():
            if owner == group_id:
                pages = self.kv_caches[name]
                pages[block] = find_poison(pages.dtype)
        self._free[group_id].append(block)


def run_with_mtp(
    model: DeepseekV4ForCausalLM, token_ids: list[int], chunks: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the model and its MTP block behind each chunk.

    Args:
        model: A model with an MTP block.
        token_ids: One more than the chunks' tokens: the block needs the next one.
        chunks: Tokens of each step.

    Returns:
        Logits of the model and of the block, [tokens, V] each.
    """
    harness = PagedHarness(model)
    sequence = harness.add(token_ids[:-1])
    main, drafted = [], []
    for count in chunks:
        start = sequence.num_computed
        # The step's own tables serve the block too: its cache is in a window group.
        main += harness.step([(sequence, count)])
        with torch.inference_mode():
            streams = model.forward_mtp(
                harness.last_streams,
                torch.tensor(token_ids[start + 1 : start + count + 1]),
                torch.arange(start, start + count),
                harness.last_meta,
                harness.kv_caches,
            )
            drafted.append(model.compute_mtp_logits(streams))
    return torch.cat(main), torch.cat(drafted)


def is_dense(group: GroupLayout) -> bool:
    """Whether a group keeps every row."""
    return group.kind == "dense" or (group.kind == "keys" and not group.window)


def _blocks_kept(group: GroupLayout, accepted: int, end: int) -> range:
    """Block indices of the rows up to ``end`` that are needed after ``accepted`` tokens."""
    if group.state is not None:
        # Of the states inside a step all: some later request may resume at any.
        spans = range(max(0, accepted - 1) // group.block_size, -(-end // group.block_size))
        pieces = group.state.num_blocks
        return range(spans.start * pieces, spans.stop * pieces) if end else range(0)
    if group.window:
        first = max(0, accepted - (group.window - 1))
    elif group.kind in ("dense", "keys"):
        first = 0
    else:
        first = accepted // group.ratio * group.ratio - (group.ratio if group.has_overlap else 0)
        first = max(first, 0)
    return (
        range(first // group.block_size, -(-end // group.block_size)) if end > first else range(0)
    )


def _to_table(held: dict[int, int]) -> BlockTableView:
    if not held:
        return BlockTableView(0, np.zeros(0, dtype=np.int64))
    base, last = min(held), max(held)
    ids = np.array([held.get(index, 0) for index in range(base, last + 1)], dtype=np.int64)
    return BlockTableView(base, ids)
