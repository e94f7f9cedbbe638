"""Errors in the shape of the Messages API.

cause                          status  type
a wrong request                 400    invalid_request_error
missing or wrong API key        401    authentication_error
unknown model or route          404    not_found_error
wrong method                    405    invalid_request_error
body too large                  413    invalid_request_error
too many requests wait          529    overloaded_error (Retry-After)
the server starts or drains     503    api_error (Retry-After)
anything else                   500    api_error
"""

import msgspec

from vllm.entrypoints.openai.errors import HttpError, describe_exception
from vllm.exceptions import QueueFullError

PATHS = ("/v1/messages",)
_OVERLOADED = 529
_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    _OVERLOADED: "overloaded_error",
}


class _Detail(msgspec.Struct, frozen=True):
    type: str
    message: str


class _Body(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: _Detail
    request_id: str | None = None


def is_messages_path(path: str) -> bool:
    """Whether a path belongs to the Messages API."""
    return any(path == known or path.startswith(known + "/") for known in PATHS)


def error_status(error: HttpError, cause: BaseException | None = None) -> int:
    """Return the status of an error: a full queue has one of its own here."""
    return _OVERLOADED if isinstance(cause, QueueFullError) else error.status


def error_body(error: HttpError, status: int, request_id: str | None = None) -> bytes:
    """Return the JSON of an error.

    Args:
        error: As the other routes tell it.
        status: As this API tells it.
        request_id: Of the HTTP request.
    """
    kind = _TYPE_OF_STATUS.get(status, "api_error")
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode(_Body(_Detail(kind, message), request_id))


def error_event(cause: BaseException) -> bytes:
    """Return the event that ends a stream with an error."""
    described = describe_exception(cause)
    body = error_body(described, error_status(described, cause))
    return b"event: error\ndata: " + body + b"\n\n"
