"""Request bodies."""

import pytest
from pydantic import ValidationError

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
