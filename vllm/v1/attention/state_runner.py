"""Recurrent layers of a step whose states a kernel reads and stores by itself.

Both kinds of tables that graphs replay (``entry_tables``, ``paged_tables``) hand their layers one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm.v1.attention.draft_states import DraftStates, StateInputs
from vllm.v1.attention.ops.triton.recurrent import StateTables, run_states
from vllm.v1.kv_cache_specs.layouts import StateLayout


@dataclass(frozen=True, slots=True)
class StateRunner:
    """Takes recurrent states through a step by a kernel; a ``RunsStates``.

    Attributes:
        tables: By group id.
        group_of: Cache name -> group id.
        kv_caches: Cache name -> pages.
        drafts: What keeps them until they are settled; None: there are none.
        draft_slots: int32 [T]: where each row is kept; negative: it is no draft.
    """

    tables: Mapping[int, tuple[StateTables, StateLayout]]
    group_of: Mapping[str, int]
    kv_caches: Mapping[str, torch.Tensor]
    drafts: DraftStates | None = None
    draft_slots: torch.Tensor | None = None

    def run_states(
        self,
        cache_name: str,
        number: int,
        num_key_heads: int,
        channels: torch.Tensor,
        weight: torch.Tensor,
        logs: torch.Tensor,
        rates: torch.Tensor,
    ) -> torch.Tensor:
        """See ``RunsStates``.

        Mutates:
            The states' pages, and what is kept of drafts.
        """
        if self.drafts is not None and self.draft_slots is not None:
            inputs = StateInputs(channels, weight, logs, rates, num_key_heads)
            self.drafts.keep(number, self.draft_slots, inputs)
        tables, layout = self.tables[self.group_of[cache_name]]
        pages = self.kv_caches[cache_name]
        return run_states(
            channels, weight, logs, rates, pages, layout, number, num_key_heads, tables
        )
