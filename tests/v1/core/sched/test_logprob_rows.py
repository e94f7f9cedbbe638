"""Rows of log probabilities are cut to the request, its tokens and its columns."""

import numpy as np

from vllm.v1.core.sched.logprob_rows import prompt_rows, slice_logprobs
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput


def output(with_offsets: bool) -> ModelRunnerOutput:
    """Requests with 2, 0 and 3 sampled tokens; row r holds r, r+.1, ..."""
    rows = np.arange(5)
    return ModelRunnerOutput(
        req_ids=["a", "b", "c"],
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        sampled_token_ids=[[1, 2], [], [3, 4, 5]],
        logprobs=LogprobsLists(
            rows[:, None] * 10 + np.arange(4),
            -(rows[:, None] + np.arange(4) / 10),
            rows + 1,
            [0, 2, 2, 5] if with_offsets else None,
        ),
    )


def test_rows_of_a_request_with_and_without_offsets() -> None:
    for with_offsets in (True, False):
        rows = slice_logprobs(output(with_offsets), 2, 2, 2)
        assert rows is not None
        assert rows.token_ids == [[20, 21, 22], [30, 31, 32]]
        assert rows.logprobs == [[-2.0, -2.1, -2.2], [-3.0, -3.1, -3.2]]
        assert rows.ranks == [3, 4]


def test_all_columns() -> None:
    rows = slice_logprobs(output(True), 0, 1, -1)
    assert rows is not None
    assert rows.token_ids == [[0, 1, 2, 3]]


def test_only_the_token_itself() -> None:
    rows = slice_logprobs(output(True), 0, 2, 0)
    assert rows is not None
    assert rows.token_ids == [[0], [10]]


def test_none() -> None:
    assert slice_logprobs(ModelRunnerOutput(["a"], {"a": 0}, [[1]]), 0, 1, 1) is None


def test_prompt_rows() -> None:
    rows = prompt_rows((np.array([[1, 2], [3, 4]]), np.zeros((2, 2)), np.array([1, 5])), 0)
    assert rows.token_ids == [[1], [3]]
    assert rows.logprobs == [[0.0], [0.0]]
    assert rows.ranks == [1, 5]
