"""The ASGI application: routes, error handlers, middleware."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from vllm import envs
from vllm.config.tenants import TenantsConfig
from vllm.entrypoints.anthropic.errors import in_dialect_of
from vllm.entrypoints.anthropic.routes import router as messages_router
from vllm.entrypoints.batch.folder_lock import ALONE, BatchSeat
from vllm.entrypoints.batch.lifecycle import open_batches
from vllm.entrypoints.decisions.routes import router as decisions_router
from vllm.entrypoints.openai.api_keys import InnerKey, KeyGuard
from vllm.entrypoints.openai.cache_feed import CacheFeed, feed_router
from vllm.entrypoints.openai.cache_routes import cache_router
from vllm.entrypoints.openai.client_metrics import ClientMetrics
from vllm.entrypoints.openai.dev_routes import dev_router
from vllm.entrypoints.openai.diagnosis.diagnoses import Diagnoses
from vllm.entrypoints.openai.diagnosis.fingerprint_store import FingerprintStore
from vllm.entrypoints.openai.disconnect import ClientGoneError
from vllm.entrypoints.openai.errors import describe_exception, name_what_is_not_served
from vllm.entrypoints.openai.explain_routes import explain_router
from vllm.entrypoints.openai.http_metrics import HttpMetrics
from vllm.entrypoints.openai.keep_alive import KeepAliveMiddleware
from vllm.entrypoints.openai.middleware import EdgeMiddleware, route_path
from vllm.entrypoints.openai.page_routes import PageSettings, page_router
from vllm.entrypoints.openai.request_scope import header_request_id
from vllm.entrypoints.openai.responses.routes import router as responses_router
from vllm.entrypoints.openai.responses.service import ResponsesService
from vllm.entrypoints.openai.responses.store import ResponseStore
from vllm.entrypoints.openai.routes import router
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState
from vllm.entrypoints.openai.transfer_routes import transfer_router
from vllm.entrypoints.pooling.routes import router as pooling_router
from vllm.exceptions import VllmError
from vllm.logger import init_logger
from vllm.version import BANNER, __version__

logger = init_logger(__name__)

# nginx's status for a client that left; nobody reads it, but metrics and logs show it.
_CLIENT_GONE = 499


class OpenAIServerApp(FastAPI):
    """FastAPI whose schema tells the statuses this server really answers with."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        document = super().openapi()
        for operations in document.get("paths", {}).values():
            for operation in operations.values():
                responses = operation.get("responses", {})
                if responses.pop("422", None) is not None:
                    responses["400"] = {"description": "The request is wrong; the body says how."}
        return document


def build_app(
    state: ServerState,
    args: ServerArgs,
    registry: CollectorRegistry,
    tenants: TenantsConfig | None = None,
    batch_seat: BatchSeat = ALONE,
) -> FastAPI:
    """Build the application. ``app.state.context`` must be set before the state turns ready.

    Args:
        state: Phase of the server.
        args: The server's settings.
        registry: Of the metrics that ``/metrics`` shows.
        tenants: Who shares the server; None: all requests are alike.
        batch_seat: What this process has to do with batches, if there are any.
    """
    app = OpenAIServerApp(
        title="vllm",
        version=__version__,
        description=BANNER,
    )
    app.state.server = state
    app.state.registry = registry
    app.state.client_metrics = ClientMetrics(registry)
    app.state.exchange = None
    app.state.peers = None
    app.state.diagnoses = Diagnoses(
        FingerprintStore(
            envs.VLLM_CACHE_FINGERPRINTS_MAX_REQUESTS,
            envs.VLLM_CACHE_FINGERPRINTS_MAX_BYTES,
            envs.VLLM_CACHE_FINGERPRINTS_MAX_AGE,
        )
    )
    app.state.responses = ResponsesService(
        ResponseStore(
            envs.VLLM_RESPONSES_STORE_MAX_RESPONSES,
            envs.VLLM_RESPONSES_STORE_MAX_BYTES,
            envs.VLLM_RESPONSES_STORE_MAX_AGE,
        ),
        app.state.diagnoses,
    )
    routers = [
        router,
        responses_router,
        messages_router,
        decisions_router,
        pooling_router,
        cache_router,
        transfer_router,
    ]
    if envs.VLLM_SERVER_DEV_MODE and args.operations.admin_key is None:
        logger.warning("VLLM_SERVER_DEV_MODE=1: routes for development are open to every client.")
    inner = None
    if args.batch.folder is not None:
        routers += open_batches(app, args.batch, frozenset(_paths_of(routers)), batch_seat)
        inner = app.state.inner_key = InnerKey()
    shows_cache = envs.VLLM_SERVER_DEV_MODE or args.operations.admin_key is not None
    if shows_cache:
        routers += [dev_router, explain_router]
    keys = KeyGuard(
        args.api_keys, args.operations.admin_key, args.operations.guards_metrics, tenants, inner
    )
    if args.operations.serves_page:
        seen_by = "open" if args.operations.admin_key is None else "operator"
        app.state.page_settings = PageSettings(
            needs_key=not keys.is_open,
            cache=seen_by if shows_cache else "off",
            reasons=args.enable_prompt_tokens_details,
        )
        routers.append(page_router)
        if shows_cache:
            app.state.cache_feed = CacheFeed()
            routers.append(feed_router)
    for routes in routers:
        app.include_router(routes)
    app.state.routers = routers
    for kind in (VllmError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _handle_error)
    app.add_exception_handler(ClientGoneError, _handle_client_gone)
    app.add_middleware(
        EdgeMiddleware,
        state=state,
        metrics=HttpMetrics(registry),
        keys=keys,
        echo_request_id=args.enable_request_id_headers,
        root_path=args.operations.root_path,
    )
    if args.operations.keep_alive_s:
        app.add_middleware(KeepAliveMiddleware, interval_s=args.operations.keep_alive_s)
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
            allow_credentials=args.allow_credentials,
        )
    return app


def _paths_of(routers: Sequence[APIRouter]) -> Iterator[str]:
    routes = (route for router in routers for route in router.routes)
    return (route.path_format for route in routes if isinstance(route, APIRoute))


def list_routes(app: FastAPI) -> dict[str, list[str]]:
    """Return the methods of each path that the OpenAPI document has; making that takes longer."""
    paths: dict[str, set[str]] = {}
    for routes in app.state.routers:
        for route in routes.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                paths.setdefault(route.path_format, set()).update(route.methods or ())
    return {path: sorted(methods) for path, methods in paths.items()}


async def _handle_error(request: Request, error: Exception) -> Response:
    described = describe_exception(error)
    if described.status in (404, 405) and isinstance(error, HTTPException):
        described = name_what_is_not_served(route_path(request.scope), described)
    if described.status == 500:
        # Unexpected ones are logged again, with their traceback, by the server above us.
        logger.error("%s %s failed: %r", request.method, request.url.path, error)
    status, headers, body = in_dialect_of(
        route_path(request.scope), described, error, header_request_id(request.scope)
    )
    if status == 500 and not isinstance(error, VllmError):
        # The server above us closes after what nobody expected: a client that is told does not
        # send its next request on this connection, to find it reset.
        headers = {**headers, "Connection": "close"}
    return Response(body, status, headers, "application/json")


async def _handle_client_gone(request: Request, _error: Exception) -> Response:
    request.app.state.client_metrics.note_dropped()
    logger.info("Client left %s before the answer began: aborted", request.url.path)
    return Response(status_code=_CLIENT_GONE)
