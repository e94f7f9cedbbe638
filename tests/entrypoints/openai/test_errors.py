"""Exceptions as HTTP errors."""

import json

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from vllm.entrypoints.openai.errors import HttpError, describe_exception
from vllm.exceptions import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    ModelNotFoundError,
    QueueFullError,
    ShuttingDownError,
    UnsupportedFeatureError,
    UserInputError,
)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UserInputError("m", "n"), 400, "BadRequestError"),
        (UnsupportedFeatureError("m"), 400, "BadRequestError"),
        (ModelNotFoundError("m", "model"), 404, "NotFoundError"),
        (HTTPException(404), 404, "NotFoundError"),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "MethodNotAllowedError"),
        (HTTPException(413, "big"), 413, "RequestTooLargeError"),
        (QueueFullError("m", 7), 503, "ServiceUnavailableError"),
        (ShuttingDownError("m"), 503, "ServiceUnavailableError"),
        (EngineDeadError("m"), 503, "ServiceUnavailableError"),
        (EngineError("m"), 500, "InternalServerError"),
        (RuntimeError("secret"), 500, "InternalServerError"),
    ],
)
def test_table(error: Exception, status: int, kind: str) -> None:
    described = describe_exception(error)
    assert described.status == status
    body = json.loads(described.body)["error"]
    assert (body["type"], body["code"]) == (kind, status)
    assert body["param"] == getattr(error, "param", None)
    assert ("Retry-After" in described.headers) == (status == 503)
    assert "secret" not in body["message"]


def test_a_full_context_is_told_in_the_words_clients_look_for() -> None:
    described = describe_exception(ContextLengthError(20000, 16384, 6, of_messages=True))
    body = json.loads(described.body)["error"]
    assert body["code"] == "context_length_exceeded"
    assert body["message"].startswith(
        "This model's maximum context length is 16384 tokens. However, you requested 20006 tokens "
        "(20000 in the messages, 6 in the completion)."
    )


def test_headers_of_an_exception_stay() -> None:
    assert describe_exception(HTTPException(405, headers={"Allow": "GET"})).headers["Allow"]
    assert describe_exception(QueueFullError("m", 7)).headers == {"Retry-After": "7"}


def test_validation_errors_name_field_and_value() -> None:
    error = RequestValidationError(
        [
            {"type": "int", "loc": ("body", "n"), "msg": "Not an integer", "input": "x" * 500},
            {"type": "missing", "loc": ("body", "prompt"), "msg": "Field required", "input": {}},
        ]
    )
    described = describe_exception(error)
    assert (described.status, described.param) == (400, "n")
    assert "n: Not an integer, got 'xxx" in described.message
    assert "prompt is required" in described.message
    assert len(described.message) < 300


def test_syntax_errors_name_the_place() -> None:
    error = RequestValidationError(
        [{"type": "json_invalid", "loc": ("body", 17), "msg": "", "ctx": {"error": "oops"}}]
    )
    described = describe_exception(error)
    assert described.param == "body.17"
    assert "oops at 17" in described.message


def test_lone_surrogates_do_not_break_the_body() -> None:
    assert json.loads(HttpError(400, "a\ud800b").body)["error"]["message"] == "a?b"
