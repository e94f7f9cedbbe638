"""Drafts of a small checkpoint that reads the target's keys and values (Gemma 4's assistants)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from vllm.model_executor.models.decoder.attention import DecoderAttention
from vllm.model_executor.models.decoder.kv_cache import cache_name
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.model_executor.models.gemma4_assistant import Gemma4Assistant, find_owners
from vllm.v1.attention.layout import CacheLayout
from vllm.v1.attention.ops.reference import rms_norm
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInput


class AssistantProposer:
    """Runs the assistant behind every step, request by request. Keeps nothing: hits cost nothing.

    Args:
        assistant: The loaded drafter.
        target: The loaded model, for its embedding and last norm.
        num_drafts: Tokens of a draft.
        layout: The target's KV groups.
        caches: Its cache views by name.

    Raises:
        ConfigError: The two do not fit together.
    """

    reads_all_rows: ClassVar[bool] = False

    def __init__(
        self,
        assistant: Gemma4Assistant,
        target: DecoderForCausalLM,
        num_drafts: int,
        layout: CacheLayout,
        caches: Mapping[str, torch.Tensor],
    ) -> None:
        self._assistant, self._target = assistant, target
        self._num_drafts = num_drafts
        self._layout = layout
        owners = find_owners(assistant.config, target.config)
        plans = zip(assistant.config.layers, owners, strict=True)
        # Window and owner of each layer's rows.
        self._reads = [(plan.window, owner) for plan, owner in plans]
        self._caches = caches

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        """Draft for the sampled requests, from the stream that gave their last token."""
        return [
            self._draft(state, streams[row + state.num_tokens - 2 - item.start])
            if count and state.num_tokens > 1
            else []
            for state, item, row, count in zip(
                step.requests, step.slices, step.row_starts, step.sampled_counts, strict=True
            )
        ]

    def forget(self, block_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept of blocks."""

    def _draft(self, state: RequestState, stream: torch.Tensor) -> list[int]:
        target = self._target
        position = state.num_tokens - 1
        found = {read: self._read(state, position, *read) for read in dict.fromkeys(self._reads)}
        rows = [found[read] for read in self._reads]
        hidden = rms_norm(
            stream.unsqueeze(0).to(target.norm.dtype), target.norm, target.config.norm.eps
        )
        token, drafts = int(state.get_tokens(position, position + 1)[0]), []
        for _ in range(self._num_drafts):
            embedded = target.embed(torch.tensor([token])) * target.embedding_scale
            token, hidden = self._assistant(embedded, hidden, position, rows)
            drafts.append(token)
        return drafts

    def _read(self, state: RequestState, position: int, window: int, owner: int) -> torch.Tensor:
        """Return the stored rows [L, 2 * K * d] that a query at a position sees before its own."""
        name, attention = cache_name(owner), self._target.layers[owner].attention
        assert isinstance(attention, DecoderAttention), "find_owners looked"
        group_id = self._layout.group_of[name]
        size = self._layout.groups[group_id].block_size
        view = state.tables.views[group_id]
        first = max(0, position - window + 1) if window else 0
        positions = np.arange(first, position)
        blocks = view.block_ids[positions // size - view.base]
        cache = self._caches[name]
        rows = cache[torch.from_numpy(blocks), torch.from_numpy(positions % size)]
        return attention.restore_rows(rows, self._target.norm.dtype)
