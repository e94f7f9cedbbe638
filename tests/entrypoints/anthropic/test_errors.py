"""Errors in Anthropic's shape, in the SDK's own types."""

import pytest
from anthropic.types import ErrorResponse

from vllm.entrypoints.anthropic.errors import error_event, in_dialect_of
from vllm.entrypoints.openai.errors import describe_exception
from vllm.exceptions import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    QueueFullError,
    ShuttingDownError,
    UserInputError,
    VllmError,
)

CASES: list[tuple[Exception, int, str]] = [
    (UserInputError("x must be y.", "x"), 400, "invalid_request_error"),
    (ModelNotFoundError("no such model", "model"), 404, "not_found_error"),
    (QueueFullError("full"), 529, "overloaded_error"),
    (ShuttingDownError("drains"), 503, "api_error"),
    (EngineDeadError("dead"), 503, "api_error"),
    (EngineError("failed"), 500, "api_error"),
    (VllmError("?"), 500, "api_error"),
    (UserInputError("bad \ud800"), 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("cause", "status", "kind"), CASES)
def test_an_error(cause: Exception, status: int, kind: str) -> None:
    described = describe_exception(cause)
    told = in_dialect_of("/v1/messages/count_tokens", described, cause, "req_1")
    assert told[0] == status
    assert told[1]["request-id"] == "req_1"
    assert ("Retry-After" in told[1]) == (status in (503, 529))
    body = ErrorResponse.model_validate_json(told[2])
    assert body.error.type == kind
    assert body.request_id == "req_1"
    head, data, *rest = error_event(cause, described).decode().split("\n")
    assert (head, rest) == ("event: error", ["", ""])
    assert ErrorResponse.model_validate_json(data.removeprefix("data: ")).error.type == kind


def test_a_full_context_is_told_in_the_words_clients_look_for() -> None:
    cause = ContextLengthError(20006, 16384)
    _, _, content = in_dialect_of("/v1/messages", describe_exception(cause), cause, "req_1")
    error = ErrorResponse.model_validate_json(content).error
    assert error.message == "prompt is too long: 20006 tokens > 16384 maximum"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messagesque", "/"])
def test_other_routes_keep_their_shape(path: str) -> None:
    described = describe_exception(QueueFullError("full"))
    status, headers, body = in_dialect_of(path, described, QueueFullError("full"), "req_1")
    assert (status, headers, body) == (503, described.headers, described.body)
