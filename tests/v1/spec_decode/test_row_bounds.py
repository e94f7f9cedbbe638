"""Drafting after a step that found a part of its window rows only."""

from collections.abc import Mapping

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.attention.layout import CacheLayout, GroupLayout
from vllm.v1.attention.step_model import make_torch_step_model
from vllm.v1.attention.step_tables import StepMetadata
from vllm.v1.core.values.cache_step import RowBounds, WindowTable
from vllm.v1.spec_decode.mtp import BlockCache, MTPProposer
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInputBuilder


class WindowReader:
    """An ``MTPModel`` that notes how many window rows from the pages each run reads."""

    def __init__(self) -> None:
        self.num_read: list[int] = []

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        reads = meta.windows[0]
        self.num_read += [int(part.lengths.sum()) for part in reads.decode_reads]
        self.num_read += [part.blocks.numel() for part in reads.chunk_reads]
        return streams

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(streams), 5)


def test_fed_back_drafts_read_no_row_below_the_steps_first() -> None:
    state = RequestState("a", [1] * 150, 150, SamplingParams(), 0, 1)
    state.num_computed_tokens = 64
    state.tables.replace_windows([WindowTable(0, base=2, block_ids=[7, 8, 9, 10])])
    bounds = {"a": RowBounds(write_from=(64,), read_from=64)}
    step = StepInputBuilder(256, 256).build([state], [86], {}, bounds)
    state.append_tokens([1])
    layout = CacheLayout((GroupLayout("window", 32, 32, window=128),), {"w": 0})
    model = WindowReader()
    device = torch.device("cpu")
    steps = make_torch_step_model(model, device)
    proposer = MTPProposer(steps, 3, BlockCache((0,), layout, {}), device)
    assert proposer.propose(step, torch.zeros(86, 1, 4), {}) == [[0, 0, 0]]
    # The chunk has all its rows by itself; of 127 rows before 150 and 151, those from 64 on exist.
    assert model.num_read == [0, 150 - 64, 151 - 64]
