"""Errors in the shape of the Messages API.

cause                          status  type
a wrong request                 400    invalid_request_error
missing or wrong API key        401    authentication_error
unknown model or route          404    not_found_error
wrong method                    405    invalid_request_error
body too large                  413    invalid_request_error
body compressed                 415    invalid_request_error
a tenant exceeds its limits     429    rate_limit_error (Retry-After)
too many requests wait          529    overloaded_error (Retry-After)
the server starts or drains     503    api_error (Retry-After)
anything else                   500    api_error
"""

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.errors import FLAT_ROOT, HttpError
from vllm.exceptions import ContextLengthError, QueueFullError, ThreadsUnsupportedError

_ROOT = "/v1/messages"
# Where Anthropic's clients look for it.
REQUEST_ID_HEADER = "request-id"
_OVERLOADED = 529
_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


# By this Anthropic's clients know that they must send the whole conversation.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class _Detail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class _Body(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: _Detail
    request_id: str | None = None


def in_dialect_of(
    path: str, error: HttpError, cause: BaseException | None = None, request_id: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Return an error's status, headers and body as the API that a path belongs to tells it.

    Args:
        path: Of the route, or of what was asked for.
        error: As most routes tell it.
        cause: What was raised, if something was.
        request_id: Of the HTTP request.
    """
    if path.startswith(FLAT_ROOT):
        error = replace(error, is_flat=True)
    if path != _ROOT and not path.startswith(_ROOT + "/"):
        return error.status, dict(error.headers), error.body
    status = _status_of(error, cause)
    headers = {**error.headers, **({REQUEST_ID_HEADER: request_id} if request_id else {})}
    return status, headers, _encode(error, status, request_id, cause)


def error_event(cause: BaseException, error: HttpError) -> bytes:
    """Return the event that ends a stream with an error.

    Args:
        cause: What was raised.
        error: As most routes tell it.
    """
    body = _encode(error, _status_of(error, cause), None, cause)
    return b"event: error\ndata: " + body + b"\n\n"


def _status_of(error: HttpError, cause: BaseException | None) -> int:
    """A full queue has a status of its own here."""
    return _OVERLOADED if isinstance(cause, QueueFullError) else error.status


def _encode(
    error: HttpError, status: int, request_id: str | None, cause: BaseException | None
) -> bytes:
    kind = _TYPE_OF_STATUS.get(status, "api_error")
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    if isinstance(cause, ContextLengthError):
        # The words that clients look for before they shorten a conversation.
        most = min(cause.limit, cause.num_tokens - 1)
        message = f"prompt is too long: {cause.num_tokens} tokens > {most} maximum"
    details = _NO_THREADS if isinstance(cause, ThreadsUnsupportedError) else UNSET
    return msgspec.json.encode(_Body(_Detail(kind, message, details), request_id))
