"""Request bodies."""

import pytest
from pydantic import BaseModel, ValidationError

from vllm.entrypoints.openai import app
from vllm.entrypoints.openai.protocol.requests import ChatCompletionRequest, CompletionRequest


def test_unknown_fields_are_kept_apart() -> None:
    body = CompletionRequest.model_validate({"prompt": "x", "odd": 1})
    assert body.model_extra == {"odd": 1}


@pytest.mark.parametrize("field", ["model", "stop", "cache_salt", "request_id"])
def test_lone_surrogates_are_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=r"surrogate|string_unicode|unicode"):
        CompletionRequest.model_validate({"prompt": "x", field: "\ud800"})
    CompletionRequest.model_validate({"prompt": "x", field: "Grüße 🙂"})


def test_messages_must_be_objects() -> None:
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate({"messages": ["hi"]})


WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "prompt_logprobs", "priority")
SWITCHES = ("stream", "ignore_eos", "echo", "return_token_ids", "skip_special_tokens")


@pytest.mark.parametrize("field", [*WHOLE, "temperature", "top_p", "min_p", "logprobs"])
@pytest.mark.parametrize("value", [True, False, "1", "0.5", ""])
def test_only_numbers_are_numbers(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match="should be a number"):
        CompletionRequest.model_validate({"prompt": "x", field: value})


@pytest.mark.parametrize("field", WHOLE)
def test_a_whole_number_may_be_written_with_a_point(field: str) -> None:
    body = CompletionRequest.model_validate({"prompt": "x", field: 2.0})
    value = getattr(body, field)
    assert (value, type(value)) == (2, int)
    with pytest.raises(ValidationError, match="fractional"):
        CompletionRequest.model_validate({"prompt": "x", field: 2.5})


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [1, 0, 1.0, "true", "no"])
def test_only_booleans_are_switches(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match="valid boolean"):
        CompletionRequest.model_validate({"prompt": "x", field: value})


def test_nested_fields_are_as_strict() -> None:
    for nested in ({"stream_options": {"include_usage": 1}}, {"stop_token_ids": [True]}):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({"prompt": "x", **nested})
    body = CompletionRequest.model_validate({"prompt": "x", "temperature": 1, "seed": None})
    assert (body.temperature, body.seed) == (1.0, None)
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate({"messages": [], "logprobs": 1})


def test_the_schema_still_tells_the_types() -> None:
    properties = CompletionRequest.model_json_schema()["properties"]
    kinds = {name: properties[name]["anyOf"][0]["type"] for name in ("n", "top_p", "stream")}
    assert kinds == {"n": "integer", "top_p": "number", "stream": "boolean"}


def _find_models(base: type[BaseModel] = BaseModel) -> set[type[BaseModel]]:
    """Every model of a body, or of a part of one, that the application's modules define."""
    found = set()
    for model in base.__subclasses__():
        found |= _find_models(model)
        if model.__module__.startswith(app.__name__.rpartition(".")[0].rpartition(".")[0]):
            found.add(model)
    return found


def _count_faults(body: type[BaseModel], name: str, value: object) -> int:
    try:
        body.model_validate({name: value})
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    "body", sorted(_find_models(), key=lambda model: model.__name__), ids=lambda body: body.__name__
)
def test_a_long_list_of_wrong_items_is_told_in_few_words(body: type[BaseModel]) -> None:
    for wrong in ({"a": object()}, object(), [object()]):
        counts = {name: _count_faults(body, name, [wrong] * 500) for name in body.model_fields}
        assert {name: count for name, count in counts.items() if count > 20} == {}
