"""Tiles of prompt rows; the runner's test covers chunks."""

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.prompt_logprobs import gather_prompt_logprobs
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInputBuilder

VOCAB = 6


def state(req_id: str, tokens: list[int], prompt_logprobs: int | None) -> RequestState:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return RequestState(req_id, tokens, len(tokens), params, 0, 1)


@pytest.mark.parametrize("tile_rows", [1, 2, 100])
def test_tiles_do_not_change_the_result(tile_rows: int) -> None:
    requests = [
        state("none", [1, 2], None),
        state("some", [0, 5, 3, 2, 4], 2),
        state("single", [4], 3),
    ]
    step = StepInputBuilder(16, 16).build(requests, [2, 5, 1], {})
    streams = torch.randn(8, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    def compute_logits(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows.sum(1)

    found = gather_prompt_logprobs(
        step, streams, compute_logits, VOCAB, tile_bytes=tile_rows * 4 * VOCAB
    )
    assert set(found) == {"some"}
    assert max(seen) <= tile_rows
    assert sum(seen) == 4
    expected = streams[2:6].sum(1).log_softmax(-1).numpy()
    assert found["some"].token_ids[:, 0].tolist() == [5, 3, 2, 4]
    np.testing.assert_allclose(
        found["some"].logprobs, np.take_along_axis(expected, found["some"].token_ids, 1), atol=1e-6
    )
    assert requests[1].num_prompt_logprobs == 4
