"""From fields to sampling parameters."""

from dataclasses import replace
from typing import Any

import pytest

from tests.entrypoints.openai.conftest import SERVED_MODEL
from vllm.entrypoints.openai.protocol.requests import CompletionRequest
from vllm.entrypoints.openai.sampling import (
    LogprobsOptions,
    check_logprobs,
    check_request,
    check_token_id,
    make_sampling_params,
    resolve_max_tokens,
)
from vllm.exceptions import UserInputError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams


def _request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a"] * 129}, "stop"),
        ({"stop_token_ids": [2048]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"cache_salt": "a\0"}, "cache_salt"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "a\nINFO forged"}, "request_id"),
    ],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UserInputError) as caught:
        check_request(_request(**fields), SERVED_MODEL)
    assert caught.value.param == param


def test_what_is_held_for_others_is_told_with_one_whole_answer() -> None:
    wish = {"kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(UserInputError, match="--kv-transfer-config"):
        check_request(_request(**wish), SERVED_MODEL)
    served_model = replace(SERVED_MODEL, has_kv_transfer=True)
    check_request(_request(**wish), served_model)
    for fields in ({"n": 2}, {"stream": True}):
        with pytest.raises(UserInputError, match="do_remote_decode") as caught:
            check_request(_request(**wish, **fields), served_model)
        assert caught.value.param in fields


def test_priority_needs_the_policy_and_32_bits() -> None:
    served_model = replace(SERVED_MODEL, has_priority=True)
    check_request(_request(priority=-3), served_model)
    check_request(_request(priority=0), SERVED_MODEL)
    with pytest.raises(UserInputError):
        check_request(_request(priority=2**31), served_model)


def test_max_tokens() -> None:
    assert resolve_max_tokens(None, 16, 10, SERVED_MODEL) == 16
    assert resolve_max_tokens(None, 16, 60, SERVED_MODEL) == 4
    assert resolve_max_tokens(None, None, 10, SERVED_MODEL) == 54
    assert resolve_max_tokens(64, 16, 10, SERVED_MODEL) == 54
    limited = replace(SERVED_MODEL, max_new_tokens=5)
    found = [resolve_max_tokens(asked, None, 10, limited) for asked in (None, 4, 64)]
    assert (found, resolve_max_tokens(None, None, 61, limited)) == ([5, 4, 5], 3)
    for num_prompt, asked, param in ((0, 1, "prompt"), (64, 1, "input_tokens"), (1, 65, "max_tok")):
        with pytest.raises(UserInputError) as caught:
            resolve_max_tokens(asked, 16, num_prompt, SERVED_MODEL)
        assert (caught.value.param or "").startswith(param)


def test_logprobs_limit() -> None:
    unlimited = replace(SERVED_MODEL, max_logprobs=-1)
    assert check_logprobs(None, SERVED_MODEL, "logprobs") is None
    assert check_logprobs(20, SERVED_MODEL, "logprobs") == 20
    assert check_logprobs(-1, unlimited, "logprobs") == -1
    assert check_logprobs(10**9, unlimited, "logprobs") == 2048
    for value, served_model in ((21, SERVED_MODEL), (-1, SERVED_MODEL), (-2, unlimited)):
        with pytest.raises(UserInputError):
            check_logprobs(value, served_model, "logprobs")


@pytest.mark.parametrize("token_id", [-1, 10, True, 1.0, "3", 10**30])
def test_token_ids(token_id: Any) -> None:
    check_token_id(9, 10, "prompt")
    with pytest.raises(UserInputError, match="0 to 9"):
        check_token_id(token_id, 10, "prompt")


def test_parameters() -> None:
    request = _request(stream=True, temperature=0, stop="a", stop_token_ids=[3], top_k=2047)
    params = make_sampling_params(request, SERVED_MODEL, 9, LogprobsOptions(2, None))
    assert params.output_kind == RequestOutputKind.DELTA
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (9, 2, None)
    assert params.stop == ["a"]
    assert request.stop_token_ids is not params.stop_token_ids
    whole = make_sampling_params(_request(), SERVED_MODEL, 9, LogprobsOptions())
    assert whole.output_kind == RequestOutputKind.FINAL_ONLY


def test_repetition_detection_is_the_engines() -> None:
    given = {"max_pattern_size": 20, "min_count": 4}
    for fields, expected in (
        ({}, None),
        ({"repetition_detection": None}, None),
        ({"repetition_detection": given}, RepetitionDetectionParams(20, 0, 4)),
        ({"repetition_detection": {}}, RepetitionDetectionParams()),
    ):
        params = make_sampling_params(_request(**fields), SERVED_MODEL, 9, LogprobsOptions())
        assert params.repetition_detection == expected


def test_a_field_that_repetition_detection_has_not_is_refused() -> None:
    given = {"max_pattern_size": 3, "min_count": 3, "max_patern": 1}
    with pytest.raises(UserInputError, match="max_patern"):
        make_sampling_params(
            _request(repetition_detection=given), SERVED_MODEL, 9, LogprobsOptions()
        )


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 257, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 256, "min_count": 33}, "min_count"),
        ({"max_pattern_size": 4, "min_count": -1}, "min_count"),
        ({"max_pattern_size": 2**70}, "max_pattern_size"),
    ],
)
def test_patterns_that_cost_too_much_are_refused(given: dict[str, int], param: str) -> None:
    fields = _request(repetition_detection=given)
    with pytest.raises(UserInputError) as caught:
        make_sampling_params(fields, SERVED_MODEL, 9, LogprobsOptions())
    assert caught.value.param == f"repetition_detection.{param}"


@pytest.mark.parametrize(
    "given",
    [RepetitionDetectionParams(3, 0, "a"), RepetitionDetectionParams(2.5, 0, 2)],  # type: ignore[arg-type]
)
def test_sizes_of_patterns_are_whole(given: RepetitionDetectionParams) -> None:
    with pytest.raises(UserInputError, match="a whole number"):
        SamplingParams(repetition_detection=given)


def test_a_shortest_pattern_is_no_fault_where_none_is_looked_for() -> None:
    SamplingParams(repetition_detection=RepetitionDetectionParams(0, 3, 4))
