"""Stop rules."""

import itertools

import pytest

from tests.v1.core.sched.builders import EOS, make_request
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched import utils
from vllm.v1.core.sched.stopping import check_sequence_repetition, check_stop
from vllm.v1.request import Request, RequestStatus


def request_with(tokens: list[int], prompt: int = 4, **params: object) -> Request:
    max_tokens = params.pop("max_tokens", 16)
    assert isinstance(max_tokens, int)
    request = make_request("a", prompt, max_tokens, params=dict(params))
    request.append_output_token_ids(tokens)
    return request


def test_goes_on() -> None:
    request = request_with([1, 2])
    assert not check_stop(request, 100)
    assert not request.is_finished()


def test_eos() -> None:
    request = request_with([1, EOS])
    assert check_stop(request, 100)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason is None


def test_ignored_eos() -> None:
    assert not check_stop(request_with([1, EOS], ignore_eos=True), 100)


def test_stop_token_names_itself() -> None:
    request = request_with([1, 42], stop_token_ids=[41, 42])
    assert check_stop(request, 100)
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == 42


@pytest.mark.parametrize("token", [EOS, 42])
def test_below_min_tokens_nothing_stops(token: int) -> None:
    request = request_with([1, token], min_tokens=3, stop_token_ids=[42])
    assert not check_stop(request, 100)
    request.append_output_token_ids(token)
    assert check_stop(request, 100)


def test_below_min_tokens_no_length_stops() -> None:
    request = request_with([1, 2], min_tokens=10)
    assert check_stop(request, 6) is False
    assert not request.is_finished()


def test_lengths() -> None:
    for request, max_model_len in (
        (request_with([1, 2], max_tokens=2), 99),
        (request_with([1]), 5),
    ):
        assert check_stop(request, max_model_len)
        assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_repetition() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    request = request_with([9, 1, 2, 1, 2, 1], repetition_detection=detection)
    assert not check_stop(request, 100)
    request.append_output_token_ids(2)
    assert check_stop(request, 100)
    assert request.status is RequestStatus.FINISHED_REPETITION
    assert request.stop_reason == "repetition_detected"


def test_the_prompt_does_not_count_as_repetition() -> None:
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    request = make_request("a", [1, 1, 1], params={"repetition_detection": detection})
    request.append_output_token_ids(1)
    assert not check_stop(request, 100)


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """The rule, word by word."""
    if params.max_pattern_size <= 0 or params.min_count < 2:
        return False
    for size in range(params.min_pattern_size or 1, params.max_pattern_size + 1):
        need = size * params.min_count
        if len(tokens) >= need and tokens[-need:] == tokens[-size:] * params.min_count:
            return True
    return False


def test_repetition_against_the_rule() -> None:
    choices = list(itertools.product(range(4), range(3), range(4)))
    for length in range(8):
        for tokens in itertools.product((0, 1), repeat=length):
            for longest, shortest, count in choices:
                params = RepetitionDetectionParams(longest, shortest, count)
                found = check_sequence_repetition(list(tokens), params)
                assert found == repeats(list(tokens), params), (tokens, params)


def test_outsiders_find_the_rules_under_their_old_name() -> None:
    assert utils.check_stop is check_stop
    assert utils.check_sequence_repetition is check_sequence_repetition
