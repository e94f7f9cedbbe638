"""Flat batches."""

import pytest

from vllm.exceptions import InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.values.cache_step import RowBounds
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInputBuilder


def request(req_id: str, tokens: list[int], computed: int) -> RequestState:
    state = RequestState(req_id, tokens, len(tokens), SamplingParams(), 0, 1)
    state.num_computed_tokens = computed
    return state


def test_prefill_decode_and_drafts_in_one_batch() -> None:
    states = [
        request("chunk", [10, 11, 12, 13, 14], 1),
        request("decode", [20, 21, 22], 2),
        request("drafts", [30, 31], 1),
        request("last chunk", [40, 41, 42], 1),
    ]
    step = StepInputBuilder(32, 64).build(states, [3, 1, 3, 2], {"drafts": [7, 8]})
    assert step.token_ids.tolist() == [11, 12, 13, 22, 31, 7, 8, 41, 42]
    assert step.positions.tolist() == [1, 2, 3, 2, 1, 2, 3, 1, 2]
    assert step.row_starts == [0, 3, 4, 7]
    assert step.sampled_counts == [0, 1, 3, 1]
    assert step.sampled_rows.tolist() == [3, 4, 5, 6, 8]
    assert [(part.start, part.num_tokens) for part in step.slices] == [
        (1, 3),
        (2, 1),
        (1, 3),
        (1, 2),
    ]
    assert [list(drafts) for drafts in step.drafts] == [[], [], [7, 8], []]
    assert states[2].num_tokens == 2  # drafts are not known tokens


def test_what_a_request_writes_reaches_its_slice() -> None:
    states = [request("plain", [1, 2, 3], 2), request("rebuild", [4, 5, 6, 7], 1)]
    bounds = {"rebuild": RowBounds(write_from=(3,), read_from=1)}
    step = StepInputBuilder(8, 8).build(states, [1, 2], {}, bounds)
    assert [(part.write_from, part.read_from) for part in step.slices] == [((), 0), ((3,), 1)]
    assert step.sampled_counts == [1, 0]


def test_only_streams_that_somebody_reads_are_wanted() -> None:
    def make_states() -> list[RequestState]:
        asks = request("prompt logprobs", [4, 5, 6, 7], 0)
        asks.sampling.params.prompt_logprobs = 1
        return [
            request("chunk", [10, 11, 12, 13, 14], 1),
            request("drafts", [30, 31], 1),
            request("last chunk", [40, 41, 42], 1),
            asks,
        ]

    drafts = {"drafts": [7, 8]}
    for reads_all, expected in ((False, [4, 1, 2, 0]), (True, [0, 0, 0, 0])):
        builder = StepInputBuilder(32, 64, reads_all=reads_all)
        step = builder.build(make_states(), [3, 3, 2, 4], drafts)
        assert [part.wanted_from for part in step.slices] == expected


def test_buffers_are_reused() -> None:
    builder = StepInputBuilder(8, 8)
    first = builder.build([request("a", [1, 2, 3], 0)], [3], {})
    second = builder.build([request("b", [9], 0)], [1], {})
    assert second.token_ids.tolist() == [9]
    assert first.token_ids.tolist() == [9, 2, 3]


def test_more_than_is_known_cannot_be_scheduled() -> None:
    with pytest.raises(InvariantError, match=r"up to position 4.*3 tokens and 0 drafts"):
        StepInputBuilder(8, 8).build([request("a", [1, 2, 3], 0)], [4], {})
