"""The compressor: turns every ``ratio`` tokens into one cache entry."""

import torch
from torch import nn

from vllm.model_executor.models.deepseek_v4.config import LayerPlan
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step


class Compressor(nn.Module):
    """Keeps open rows in a state cache and writes completed entries to an entry cache.

    The projections of a token, ``c`` (wkv) and ``g`` (wgate), are computed by the caller, fused
    with the other matrices over the same input.

    Args:
        plan: The layer's kind and ratio.
        width: Width d of an entry.
        state_name: Name of the state cache.
        entry_name: Name of the entry cache.
        parts: What to build from.
        has_biases: Whether scores have a bias by place in the window.
    """

    def __init__(
        self,
        plan: LayerPlan,
        width: int,
        state_name: str,
        entry_name: str,
        parts: ModelParts,
        *,
        has_biases: bool = True,
    ) -> None:
        super().__init__()
        self.row_width = 2 * width if plan.kind == "csa" else width
        self._state_name, self._entry_name = state_name, entry_name
        self._eps = parts.config.rms_norm_eps
        self._dtype = parts.make.dtype
        self._has_biases = has_biases
        self.ape = parts.make.parameter(
            plan.ratio if has_biases else 0, self.row_width, dtype=torch.float32
        )
        self.norm = parts.make.parameter(width)
        self._compress = parts.ops("compress_windows")
        self._rms_norm = parts.ops("rms_norm")
        self._rotate_ = parts.ops("rotate_")
        self._write_rows = parts.ops("write_rows")
        self._read_rows = parts.ops("read_rows")

    def forward(self, projected: torch.Tensor, step: Step) -> None:
        """Stores this step's rows, then the entries they complete.

        Args:
            projected: [T, 2 * row_width], c and g side by side.
            step: The step.

        Mutates:
            ``projected`` (g gets its position bias), the state cache and the entry cache.
        """
        entries = self.complete(projected, step)
        if entries is None:
            return
        meta = step.meta
        self._rotate_(entries, step.entry_turns[meta.group_of[self._state_name]].rows)
        target = meta.entries[meta.group_of[self._entry_name]].target
        self._write_rows(step.kv_caches[self._entry_name], target.blocks, target.rows, entries)

    def complete(self, projected: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Stores this step's rows; returns the entries they complete, not turned yet.

        Returns:
            Normed [N, d], in the order of the step's completed windows; None: there are none.

        Mutates:
            ``projected``, see ``forward``, and the state cache.
        """
        state = step.meta.states[step.meta.group_of[self._state_name]]
        cache = step.kv_caches[self._state_name]
        rows = projected.float()
        if self._has_biases:
            rows[:, self.row_width :] += self.ape[state.phases]
        writes = state.writes
        kept = rows if writes.sources is None else rows[writes.sources]
        self._write_rows(cache, writes.target.blocks, writes.target.rows, kept)
        if not state.num_completed:
            return None
        source = rows
        if state.prior.blocks.shape[0]:
            prior = self._read_rows(cache, state.prior.blocks, state.prior.rows, torch.float32)
            source = torch.cat([prior, rows])
        previous = None if state.previous_windows is None else source[state.previous_windows]
        entries = self._compress(source[state.windows], previous, state.no_previous)
        normed: torch.Tensor = self._rms_norm(entries.to(self._dtype), self.norm, self._eps)
        return normed

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination, but for the caller's matrices."""
        biases = {f"{prefix}.ape": self.ape.data} if self._has_biases else {}
        return {**biases, f"{prefix}.norm.weight": self.norm.data}
