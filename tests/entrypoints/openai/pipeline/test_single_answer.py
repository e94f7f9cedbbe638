"""What the APIs without ``n`` share on the way to the engine."""

from typing import Any

import pytest

from vllm.entrypoints.openai.pipeline.single_answer import (
    check_encodable,
    check_single,
    fields_named,
    sampling_of,
)
from vllm.entrypoints.openai.protocol.requests import SamplingRequest
from vllm.exceptions import ModelNotFoundError, UnsupportedFeatureError, UserInputError


def test_sampling_fields_are_those_of_a_chat() -> None:
    body = SamplingRequest(temperature=0.5, seed=3, max_tokens=7, n=1, stream=True, cache_salt="s")
    chat = sampling_of(body, stop=["x"], response_format=None)
    assert (chat.temperature, chat.seed, chat.cache_salt, chat.stop) == (0.5, 3, "s", ["x"])
    # These the APIs spell otherwise: they are told apart.
    assert (chat.max_tokens, chat.n, chat.stream, chat.response_format) == (None,) * 4


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"n": 2}, UserInputError),
        ({"prompt_logprobs": 0}, UnsupportedFeatureError),
        ({"return_token_ids": True}, UnsupportedFeatureError),
    ],
)
def test_what_has_no_place_in_one_answer_is_refused(
    fields: dict[str, Any], kind: type[UserInputError]
) -> None:
    (name,) = fields
    with pytest.raises(kind, match=name) as raised:
        check_single(SamplingRequest(**fields))
    assert raised.value.param == name
    check_single(SamplingRequest(n=1, return_token_ids=False))


def test_errors_speak_of_the_requests_own_fields() -> None:
    names = {"max_tokens": "max_output_tokens"}
    with pytest.raises(UnsupportedFeatureError) as renamed, fields_named(names):
        raise UnsupportedFeatureError("max_tokens=9 is above max_tokens.", "max_tokens")
    assert str(renamed.value) == "max_output_tokens=9 is above max_tokens."
    assert renamed.value.param == "max_output_tokens"
    with pytest.raises(ModelNotFoundError, match=r"^model 'x'$"), fields_named(names):
        raise ModelNotFoundError("model 'x'", "model")


@pytest.mark.parametrize("value", ["\ud800", {"a": ["\udfff"]}, {"\ud800": 1}])
def test_what_json_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(UserInputError, match="cannot be written as JSON") as raised:
        check_encodable(value, "input")
    assert raised.value.param == "input"


def test_what_is_nested_too_deeply_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(UserInputError, match="too many levels"):
        check_encodable(value, "input")
    assert check_encodable({"a": "é"}, "input") == len('{"a":"é"}'.encode())
