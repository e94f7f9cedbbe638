"""Drafts: kept while they match, and one sampled token more."""

import numpy as np
import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInputBuilder
from vllm.v1.worker.step_output import accept_tokens


def state(req_id: str, num_tokens: int, computed: int) -> RequestState:
    result = RequestState(req_id, list(range(num_tokens)), num_tokens, SamplingParams(), 0, 1)
    result.num_computed_tokens = computed
    return result


@pytest.mark.parametrize(
    ("drafts", "sampled", "accepted"),
    [
        ([], [9], [9]),
        ([5], [5, 6], [5, 6]),
        ([5], [4, 6], [4]),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]),
        ([5, 6, 7], [5, 6, 0, 8], [5, 6, 0]),
        ([5, 6, 7], [5, 0, 7, 8], [5, 0]),
    ],
)
def test_accepted_tokens(drafts: list[int], sampled: list[int], accepted: list[int]) -> None:
    chunk, request = state("chunk", 8, 0), state("r", 3, 2)
    step = StepInputBuilder(16, 16).build(
        [chunk, request], [4, 1 + len(drafts)], {"r": drafts} if drafts else {}
    )
    rows = len(sampled)
    table = LogprobsLists(
        np.array(sampled)[:, None], np.arange(rows, dtype=np.float32)[:, None], np.arange(rows)
    )
    result = accept_tokens(step, SamplerOutput(np.array(sampled), table))
    assert result.req_ids == ["chunk", "r"]
    assert result.req_id_to_index == {"chunk": 0, "r": 1}
    assert result.sampled_token_ids == [[], accepted]
    assert chunk.num_tokens == 8
    assert request.get_tokens(3, request.num_tokens).tolist() == accepted
    assert result.logprobs is not None
    assert result.logprobs.cu_num_generated_tokens == [0, 0, len(accepted)]
    assert result.logprobs.logprob_token_ids[:, 0].tolist() == accepted
    assert result.logprobs.sampled_token_ranks.tolist() == list(range(len(accepted)))


def test_a_step_of_chunks_alone_yields_nothing() -> None:
    step = StepInputBuilder(16, 16).build([state("chunk", 8, 0)], [4], {})
    result = accept_tokens(step, None)
    assert result.sampled_token_ids == [[]]
    assert result.logprobs is None
