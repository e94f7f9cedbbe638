"""Which rows of a step requests for vectors get."""

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.request_options import PoolingParams
from vllm.v1.worker.pooling import gather_pooled
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInputBuilder
from vllm.v1.worker.step_output import accept_tokens

LAST, ALL = PoolingParams(), PoolingParams(all_rows=True)


class Head:
    """Doubles rows; the logit of token t is t + the row's first value."""

    def __init__(self) -> None:
        self.num_heads_run = 0

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        assert len(streams) == 1, "rows go one by one"
        return streams * 2

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        self.num_heads_run += 1
        return streams[:, :1] + torch.arange(10.0)


def make_state(req_id: str, num_tokens: int, pooling: PoolingParams | None) -> RequestState:
    params = SamplingParams(max_tokens=1)
    return RequestState(req_id, list(range(num_tokens)), num_tokens, params, 0, 1, pooling)


def run(states: list[RequestState], counts: list[int], head: Head):
    step = StepInputBuilder(64, 64, reads_all=False).build(states, counts, {})
    streams = torch.arange(float(step.num_tokens)).unsqueeze(1).expand(-1, 3)
    vectors = gather_pooled(step, streams, head)
    output = accept_tokens(step, None)
    for state, count in zip(states, counts, strict=True):
        state.num_computed_tokens += count
    return step, vectors, output


def test_the_last_token_of_a_prompt_in_chunks() -> None:
    states, head = [make_state("a", 5, LAST), make_state("b", 3, ALL)], Head()
    step, vectors, output = run(states, [3, 2], head)
    assert step.sampled_counts == [0, 0]
    assert vectors is not None
    assert vectors[0] is None
    assert vectors[1][:, 0].tolist() == [6.0, 8.0]
    assert output.sampled_token_ids == [[], []]
    # A row that nobody wants need not be computed; all of the second request's must be.
    assert [part.wanted_from for part in step.slices] == [3, 0]
    step, vectors, output = run(states, [2, 1], head)
    assert vectors[0].tolist() == [[2.0] * 3]
    assert vectors[1].tolist() == [[4.0] * 3]
    # The scheduler is told that they end.
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 1]
    assert step.slices[0].wanted_from == 4
    assert head.num_heads_run == 0


def test_rows_that_were_told_are_not_told_again() -> None:
    state, head = make_state("a", 4, ALL), Head()
    run([state], [3], head)
    state.num_computed_tokens = 0  # preempted
    _, vectors, _ = run([state], [4], head)
    assert len(vectors[0]) == 1


def test_logits_in_the_place_of_a_vector() -> None:
    state, head = make_state("a", 2, PoolingParams(logit_ids=[7, 3])), Head()
    _, vectors, _ = run([state], [2], head)
    assert vectors[0].tolist() == [[8.0, 4.0]]
    assert vectors[0].dtype == np.float32


def test_nobody_asks() -> None:
    state = make_state("a", 2, None)
    step = StepInputBuilder(64, 64, reads_all=False).build([state], [2], {})
    assert gather_pooled(step, torch.zeros(2, 3), Head()) is None
    assert step.sampled_counts == [1]
