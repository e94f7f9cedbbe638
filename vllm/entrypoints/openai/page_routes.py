"""``/`` and ``/cache``: one page, a chat beside the cache that answers it.

The page has no data: its scripts ask the server's own routes for them, with the visitor's key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai.context import ServingContext

# Where the page is, and what it loads; none of it needs a key.
PAGE_PATHS = frozenset({"/", "/cache"})
ASSETS_ROOT = "/ui/"

_TYPES: Mapping[str, str] = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "cache.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
}
# Nothing from elsewhere, nothing written into the page, and nowhere to send anything.
_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Another version of the server has another page.
    "Cache-Control": "no-cache",
}

page_router = APIRouter(tags=["page"])


@dataclass(frozen=True, slots=True)
class PageSettings:
    """What the page must know before it asks for anything.

    Attributes:
        needs_key: Whether the API's routes need a key.
        cache: Who may see the cache: "open" (as the API), "operator" (with the operator's key), or
            "off" (nobody).
        reasons: Whether usage tells why tokens missed.
        records: Whether requests are recorded, so that a replay can find what would have helped.
    """

    needs_key: bool
    cache: str
    reasons: bool
    records: bool = False


def is_page(path: str) -> bool:
    """Whether a path is the page's or one of its parts'."""
    return path in PAGE_PATHS or path.startswith(ASSETS_ROOT)


def _read(name: str) -> Response:
    content = files("vllm.entrypoints.openai.pages").joinpath(name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=_TYPES[name])


@page_router.get("/", include_in_schema=False)
@page_router.get("/cache", include_in_schema=False)
async def show_page() -> Response:
    """Show the page."""
    return _read("page.html")


@page_router.get("/ui/settings", include_in_schema=False)
async def tell_settings(request: Request) -> Response:
    """Tell the page what this server offers it."""
    settings: PageSettings = request.app.state.page_settings
    # None: the engine is starting, and the page asks again.
    context: ServingContext | None = getattr(request.app.state, "context", None)
    if context is not None:
        records = context.config.observability_config.cache_trace is not None
        settings = replace(settings, records=records)
    return Response(msgspec.json.encode(settings), headers=_HEADERS, media_type="application/json")


@page_router.get("/ui/{name}", include_in_schema=False)
async def load_part(name: str) -> Response:
    """Load one of the page's parts."""
    return _read(name) if name in _TYPES else Response(status_code=404)
