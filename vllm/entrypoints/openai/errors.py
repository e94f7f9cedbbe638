"""The one error body, and the one place where exceptions become HTTP statuses.

exception                                   status  type
UserInputError, UnsupportedFeatureError      400    BadRequestError
invalid body (pydantic, JSON, content type)  400    BadRequestError
missing or wrong API key                     401    AuthenticationError
an API key where the operator's is needed    403    PermissionDeniedError
ModelNotFoundError, ResponseNotFoundError,   404    NotFoundError
unknown route
wrong method                                 405    MethodNotAllowedError
body too large                               413    RequestTooLargeError
body compressed                              415    UnsupportedMediaTypeError
TenantLimitError                             429    RateLimitError (Retry-After)
QueueFullError, ShuttingDownError,           503    ServiceUnavailableError (Retry-After)
EngineDeadError, EngineCoreLostError
anything else                                500    InternalServerError
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from vllm.exceptions import (
    EngineCoreLostError,
    EngineDeadError,
    FileNotStoredError,
    ModelNotFoundError,
    PrefixNotFoundError,
    QueueFullError,
    ResponseNotFoundError,
    ShuttingDownError,
    TenantLimitError,
    UserInputError,
)
from vllm.logger import init_logger

logger = init_logger(__name__)

_TYPE_OF_STATUS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Most specific first.
_STATUS_OF_EXCEPTION: tuple[tuple[type[Exception], int], ...] = (
    (ModelNotFoundError, 404),
    (ResponseNotFoundError, 404),
    (PrefixNotFoundError, 404),
    (FileNotStoredError, 404),
    (UserInputError, 400),
    (TenantLimitError, 429),
    (QueueFullError, 503),
    (ShuttingDownError, 503),
    (EngineDeadError, 503),
    (EngineCoreLostError, 503),
)
_RETRY_AFTER_S = 5
_MAX_SHOWN = 5
_MAX_VALUE_CHARS = 80


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; ``code`` names a cause that clients act upon, or repeats the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error response, and of an error inside a stream."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error, ready to be sent."""

    status: int
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None
    is_flat: bool = False

    @property
    def body(self) -> bytes:
        """The JSON body, in UTF-8."""
        kind = _TYPE_OF_STATUS.get(self.status, "HTTPError")
        # A lone surrogate of the request's must not make the answer unencodable.
        message = self.message.encode("utf-8", "replace").decode("utf-8")
        detail = ErrorDetail(message, kind, self.param, self.code or self.status)
        body = {"message": message, "error": detail} if self.is_flat else ErrorBody(detail)
        return msgspec.json.encode(body)


# Routes of the same APIs that other models have, by how their paths begin.
_BATCHES, _FILES = "Batches by HTTP are", "Storing files is"
_NOT_SERVED = {
    "/embed": "This form of embeddings is",
    "/v1/classify": "Classification is",
    "/v1/vector_stores": "Searching files is",
    "/v1/conversations": "Storing conversations is",
    "/classify": "Classification is",
    "/v1/audio": "Audio is",
    "/v1/realtime": "Audio is",
    "/v1/images": "Making images is",
    "/v1/videos": "Making videos is",
    "/v1/moderations": "Moderation is",
    "/v1/files": _FILES,
    "/v1/batches": _BATCHES,
    "/v1/fine_tuning": "Training is",
    "/v1/assistants": "Assistants are",
    "/v1/threads": "Assistants are",
    "/v1/messages/batches": "Batches of messages are",
}
# What clients ask for whose base URL lacks /v1.
_WITHOUT_V1 = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages",
    "/models",
    "/embeddings",
)
# Cohere's clients look for the message at the top.
FLAT_ROOT = "/v2/"


def name_what_is_not_served(path: str, error: HttpError) -> HttpError:
    """Return the error of a path without a route, which names what clients look for there."""
    what = next((w for root, w in _NOT_SERVED.items() if f"{path}/".startswith(f"{root}/")), None)
    if what is None and (path.startswith("/v1/v1/") or path in _WITHOUT_V1):
        adds = path.startswith("/v1/")
        fault = "this client adds /v1 itself" if adds else "this client adds no /v1"
        message = f"There is no such route: {fault}, so give it the base URL "
        return HttpError(404, f"{message}{'without' if adds else 'with'} it.")
    if what is None:
        return error
    message = f"{what} not served here: this server's models make text, vectors and scores."
    if what in (_BATCHES, _FILES):
        message = f"{what} not served here: this server was started without --batch-dir."
        message += " (vllm run-batch takes files of requests.)" if what == _BATCHES else ""
    return HttpError(404, message)


def describe_exception(error: BaseException) -> HttpError:
    """Return how an exception is told to a client; an unexpected one tells no details."""
    if isinstance(error, RequestValidationError):
        return _describe_validation(error.errors())
    if isinstance(error, HTTPException):
        return _describe_http_exception(error)
    for kind, status in _STATUS_OF_EXCEPTION:
        if isinstance(error, kind):
            return HttpError(
                status,
                str(error),
                getattr(error, "param", None),
                _retry_headers(error, status),
                getattr(error, "code", None),
            )
    return HttpError(500, "The server failed to answer this request; its log has the details.")


def describe_late_exception(error: BaseException, name: str) -> HttpError:
    """Return how an exception is told in a response that has begun; its status cannot say it.

    One that nobody expected is logged: the server above sees a response that ended well.

    Args:
        error: What was raised.
        name: Of the response, for the log.
    """
    described = describe_exception(error)
    if described.status == 500:
        logger.error("%s failed after it had begun", name, exc_info=error)
    return described


def _retry_headers(error: BaseException, status: int) -> dict[str, str]:
    if status not in (429, 503):
        return {}
    return {"Retry-After": str(getattr(error, "retry_after_s", _RETRY_AFTER_S))}


def _describe_http_exception(error: HTTPException) -> HttpError:
    messages = {
        404: "There is no such route; /docs lists them.",
        405: "This route does not take that method; the Allow header says which.",
        400: "The body cannot be read: send JSON in UTF-8 that is not nested too deeply.",
    }
    is_default = error.status_code in (404, 405) or "parsing the body" in str(error.detail)
    message = messages.get(error.status_code) if is_default else None
    return HttpError(
        error.status_code, message or str(error.detail), None, dict(error.headers or {})
    )


def _describe_validation(errors: Sequence[Mapping[str, Any]]) -> HttpError:
    if not errors:
        return HttpError(400, "The request is not valid.")
    first = errors[0]
    location = [str(part) for part in first.get("loc", ())]
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return HttpError(
            400, f"The body is not valid JSON ({reason} at {location[-1]}).", ".".join(location)
        )
    field_path = location[1:]
    if not field_path:
        return HttpError(
            400,
            "The body must be a JSON object, sent with 'Content-Type: application/json'.",
            "body",
        )
    lines = [_validation_line(entry) for entry in errors[:_MAX_SHOWN]]
    return HttpError(400, "; ".join(dict.fromkeys(lines)) + ".", field_path[0])


def _validation_line(entry: Mapping[str, Any]) -> str:
    parts = [str(part) for part in entry.get("loc", ())[1:]]
    # The validator's names for the kinds that a field may be are nobody's fields.
    path = ".".join(part for part in parts if not part.endswith("]"))
    shown = repr(entry.get("input"))
    if len(shown) > _MAX_VALUE_CHARS:
        shown = shown[:_MAX_VALUE_CHARS] + "..."
    if entry.get("type") == "missing":
        return f"{path} is required"
    return f"{path}: {entry.get('msg', 'invalid')}, got {shown}"
