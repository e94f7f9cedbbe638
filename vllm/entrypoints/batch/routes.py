"""The routes of files and batches; a server without ``--batch-dir`` has none of them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from vllm.entrypoints.batch.batch_service import ENDPOINTS, WINDOW, BatchService
from vllm.entrypoints.batch.batch_store import BatchBody
from vllm.entrypoints.batch.file_store import BATCH, FileObject, FileStore, FileWriter
from vllm.entrypoints.batch.multipart import FormParser, PartBegin, read_boundary
from vllm.entrypoints.batch.validation import MAX_FILE_BYTES
from vllm.entrypoints.openai.disconnect import ClientGoneError
from vllm.entrypoints.openai.protocol.requests import Text, Whole
from vllm.entrypoints.openai.responses.options import check_metadata
from vllm.entrypoints.openai.watched_route import WatchedRoute
from vllm.exceptions import UserInputError
from vllm.v1.engine.tenant_limits import current_tenant

PURPOSES = (BATCH, "assistants", "evals", "fine-tune", "user_data", "vision")
# Seconds for which a file may be kept.
_MIN_EXPIRY_S, _MAX_EXPIRY_S = 3600, 2_592_000
_MAX_VALUE_BYTES = 4096

files_router = APIRouter(tags=["files and batches"])
batches_router = APIRouter(tags=["files and batches"], route_class=WatchedRoute)


class ExpiresAfter(BaseModel):
    """When a file goes by itself."""

    anchor: Literal["created_at"]
    seconds: Whole


class BatchRequestBody(BaseModel):
    """``POST /v1/batches``."""

    model_config = ConfigDict(extra="allow")

    input_file_id: Text
    endpoint: Text
    completion_window: Text
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None


class _Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


async def _get_files(request: Request) -> FileStore:
    files: FileStore = request.app.state.files
    return files


async def _get_batches(request: Request) -> BatchService:
    batches: BatchService = request.app.state.batches
    return batches


Files = Annotated[FileStore, Depends(_get_files)]
Batches = Annotated[BatchService, Depends(_get_batches)]


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _page(found: Sequence[FileObject | BatchBody], after: str | None, limit: int) -> Response:
    """Return what stands behind an id, so many at most."""
    start = 0
    if after is not None:
        places = (i for i, one in enumerate(found) if one.id == after)
        start = next((place + 1 for place in places), -1)
        if start < 0:
            raise UserInputError(f"after={after[:80]!r} is in no list here.", "after")
    page = found[start : start + limit]
    return _json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": start + limit < len(found),
        }
    )


def _check_limit(limit: int, most: int) -> int:
    if not 1 <= limit <= most:
        raise UserInputError(f"limit={limit} must be 1 to {most}.", "limit")
    return limit


def check_expiry(seconds: int, param: str) -> int:
    """Return seconds for which a file is kept.

    Raises:
        UserInputError: They are too few or too many.
    """
    if not _MIN_EXPIRY_S <= seconds <= _MAX_EXPIRY_S:
        raise UserInputError(
            f"{param}.seconds={seconds} must be {_MIN_EXPIRY_S} to {_MAX_EXPIRY_S}.", param
        )
    return seconds


# ---- files -----------------------------------------------------------------------------------


class _Upload:
    """A form on its way: plain values, and the file, which is written as it comes.

    Owns: the file's writer, until ``finish``.
    """

    def __init__(self, files: FileStore, owner: str | None) -> None:
        self._files, self._owner = files, owner
        self._values: dict[str, bytearray] = {}
        self._part = ""
        self._writer: FileWriter | None = None
        self._held = ExitStack()

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    def begin(self, part: PartBegin) -> None:
        """Begin a part."""
        self._part = part.name
        if part.name != "file":
            self._values[part.name] = bytearray()
            return
        if self._writer is not None:
            raise UserInputError("The form holds several files: send one.", "file")
        self._writer = self._held.enter_context(
            self._files.write(self._owner, part.filename or "upload", BATCH)
        )

    def add(self, data: bytes) -> None:
        """Add to the part that began last."""
        if self._part != "file":
            value = self._values[self._part]
            value += data
            if len(value) > _MAX_VALUE_BYTES:
                raise UserInputError(f"{self._part[:60]} is too long.", self._part[:60])
            return
        assert self._writer is not None
        self._writer.add(data)
        if self._writer.num_bytes > MAX_FILE_BYTES:
            raise UserInputError(f"The file has more than {MAX_FILE_BYTES} bytes.", "file")

    def finish(self) -> FileObject:
        """Keep the file.

        Raises:
            UserInputError: The form lacks something, or has something wrong.
        """
        values = {name: value.decode("utf-8", "replace") for name, value in self._values.items()}
        purpose = values.get("purpose")
        if purpose not in PURPOSES:
            raise UserInputError(
                f"purpose={str(purpose)[:60]!r} must be one of {', '.join(PURPOSES)}.", "purpose"
            )
        if self._writer is None:
            raise UserInputError("file is required: send it as a part of the form.", "file")
        self._writer.describe(purpose, _read_expiry(values))
        return self._writer.finish()


def _read_expiry(values: Mapping[str, str]) -> int | None:
    anchor = values.get("expires_after[anchor]")
    seconds = values.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or seconds is None or not seconds.isdecimal() or len(seconds) > 9:
        raise UserInputError(
            "expires_after must have anchor=created_at and a whole number of seconds.",
            "expires_after",
        )
    return check_expiry(int(seconds), "expires_after")


@files_router.post("/v1/files")
async def upload_file(request: Request, files: Files) -> Response:
    """Keep a file: a form with file and purpose."""
    parser = FormParser(read_boundary(request.headers.get("content-type", "")))
    with _Upload(files, current_tenant.get()) as upload:
        async for data in _pieces(request):
            for event in parser.feed(data):
                if isinstance(event, PartBegin):
                    upload.begin(event)
                else:
                    upload.add(event.data)
        if not parser.is_complete:
            raise UserInputError("The form is broken: it has no last boundary.", "file")
        return _json(upload.finish())


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    try:
        async for data in request.stream():
            yield data
    except ClientDisconnect as error:
        raise ClientGoneError from error


@files_router.get("/v1/files")
async def list_files(
    files: Files,
    after: str | None = None,
    limit: int = 10_000,
    order: Annotated[str, Query()] = "desc",
    purpose: str | None = None,
) -> Response:
    """List the files."""
    if order not in ("asc", "desc"):
        raise UserInputError(f"order={order[:60]!r} must be asc or desc.", "order")
    found = [f for f in files.files_of(current_tenant.get()) if purpose in (None, f.purpose)]
    if order == "desc":
        found.reverse()
    return _page(found, after, _check_limit(limit, 10_000))


@files_router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, files: Files) -> Response:
    """Say what is known of a file."""
    return _json(files.find(file_id, current_tenant.get()))


@files_router.get("/v1/files/{file_id}/content")
async def retrieve_content(file_id: str, files: Files) -> Response:
    """Return a file's content."""
    path = files.path_of(file_id, current_tenant.get())
    return FileResponse(path, media_type="application/octet-stream")


@files_router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, files: Files, batches: Batches) -> Response:
    """Remove a file."""
    owner = current_tenant.get()
    files.find(file_id, owner)
    user = batches.user_of(file_id)
    if user is not None:
        raise UserInputError(
            f"The file {file_id!r} is the input of {user}, which runs: cancel that first.",
            "file_id",
        )
    files.delete(file_id, owner)
    return _json(_Deleted(file_id, "file"))


# ---- batches ---------------------------------------------------------------------------------


@batches_router.post("/v1/batches")
async def create_batch(body: BatchRequestBody, request: Request, batches: Batches) -> Response:
    """Answer a file of requests, below all that others wait for."""
    served: frozenset[str] = request.app.state.batch_endpoints
    if body.endpoint not in served:
        known = ", ".join(name for name in ENDPOINTS if name in served)
        raise UserInputError(f"endpoint={body.endpoint[:60]!r} must be one of {known}.", "endpoint")
    if body.completion_window != WINDOW:
        raise UserInputError(
            f"completion_window={body.completion_window[:60]!r} must be {WINDOW}.",
            "completion_window",
        )
    expiry = body.output_expires_after
    return _json(
        batches.create(
            current_tenant.get(),
            body.input_file_id,
            body.endpoint,
            metadata=check_metadata(body.metadata),
            output_expires_in=None
            if expiry is None
            else check_expiry(expiry.seconds, "output_expires_after"),
        )
    )


@batches_router.get("/v1/batches")
async def list_batches(batches: Batches, after: str | None = None, limit: int = 20) -> Response:
    """List the batches, the newest first."""
    return _page(batches.batches_of(current_tenant.get()), after, _check_limit(limit, 100))


@batches_router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, batches: Batches) -> Response:
    """Say how far a batch is."""
    return _json(batches.find(batch_id, current_tenant.get()))


@batches_router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, batches: Batches) -> Response:
    """Send nothing more of a batch; what is done is kept."""
    return _json(batches.cancel(batch_id, current_tenant.get()))


@batches_router.delete("/v1/batches/{batch_id}")
async def delete_batch(batch_id: str, batches: Batches) -> Response:
    """Forget a batch that has ended; its files stay."""
    batches.delete(batch_id, current_tenant.get())
    return _json(_Deleted(batch_id, "batch"))
