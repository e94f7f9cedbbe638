"""Who may ask for what: keys of clients, and one of the operator."""

import hmac
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers

from vllm.config.tenants import TenantsConfig, digest_key
from vllm.entrypoints.openai.errors import HttpError

# Routes that change or show what other users of the server rely on.
_ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/server_info"})
_ADMIN_ROOTS = ("/v1/cache/", "/cache/")
# Of those, a client's own: it can end no sessions but its tenant's.
_CLIENT_ROOT = "/v1/cache/sessions/"


def is_admin_path(path: str) -> bool:
    """Whether a path is the operator's, where there is an operator's key."""
    if path.startswith(_CLIENT_ROOT):
        return False
    return path in _ADMIN_PATHS or path.startswith(_ADMIN_ROOTS)


class InnerKey:
    """A key that this process alone knows: for requests that it sends to itself.

    They come in the name of whoever asked for them before, and run below all others.
    """

    _NAME, _OWNER = "x-vllm-inner-key", "x-vllm-inner-owner"

    def __init__(self) -> None:
        self._key = secrets.token_hex(32)

    def headers(self, owner: str | None) -> dict[str, str]:
        """Return what a request carries; ``owner`` is a tenant's name, or None."""
        return {self._NAME: self._key, self._OWNER: owner or ""}

    def fits(self, headers: Headers) -> bool:
        """Whether a request is one of them."""
        return hmac.compare_digest(headers.get(self._NAME, "").encode(), self._key.encode())

    def owner(self, headers: Headers) -> str | None:
        """Return in whose name it is sent."""
        return headers.get(self._OWNER) or None


class KeyGuard:
    """Checks the keys of requests.

    Args:
        api_keys: Of clients; none: all but the operator's routes is open.
        admin_key: Opens everything, and alone the operator's routes; None: these are like others.
        guards_metrics: Whether ``/metrics`` needs a key too.
        tenants: Whose keys are taken besides; None: there are none.
        inner: Opens all but the operator's routes; None: the server sends itself nothing.
    """

    def __init__(
        self,
        api_keys: Sequence[str],
        admin_key: str | None = None,
        guards_metrics: bool = False,
        tenants: TenantsConfig | None = None,
        inner: InnerKey | None = None,
    ) -> None:
        self._tenants = tenants
        self._inner = inner
        self._admin_keys = () if admin_key is None else (admin_key.encode(),)
        self._api_keys = tuple(key.encode() for key in api_keys)
        self._guards_metrics = guards_metrics

    @property
    def is_open(self) -> bool:
        """Whether the API's routes need no key."""
        return not self._api_keys and (self._tenants is None or self._tenants.is_open)

    def find_refusal(self, path: str, headers: Headers) -> HttpError | None:
        """Return why a request is refused; None: it is not."""
        if is_admin_path(path) and self._admin_keys:
            return self._check_admin(headers)
        if self.is_inner(headers):
            return None
        if self.is_open or _matches(headers, (*self._api_keys, *self._admin_keys)):
            return None
        if self.find_tenant(headers) is not None:
            return None
        return _unauthorized("A valid API key is needed")

    def is_inner(self, headers: Headers) -> bool:
        """Whether the server sends a request to itself."""
        return self._inner is not None and self._inner.fits(headers)

    def find_tenant(self, headers: Headers) -> str | None:
        """Return the tenant whose key a request has; None: it has none's."""
        if self._tenants is None:
            return None
        if self._inner is not None and self._inner.fits(headers):
            return self._inner.owner(headers)
        # By digests: how long it takes to look one up says nothing of the keys.
        names = (self._tenants.by_key.get(digest_key(key)) for key in _given_keys(headers))
        return next((name for name in names if name is not None), None)

    def find_refused_scrape(self, headers: Headers) -> HttpError | None:
        """The same for ``/metrics``, which is open unless it is guarded."""
        return self.find_refusal("/metrics", headers) if self._guards_metrics else None

    def _check_admin(self, headers: Headers) -> HttpError | None:
        if _matches(headers, self._admin_keys):
            return None
        if _matches(headers, self._api_keys) or self.find_tenant(headers) is not None:
            return HttpError(403, "This route needs the operator's key (--admin-api-key).")
        return _unauthorized("The operator's key (--admin-api-key) is needed")


def _unauthorized(why: str) -> HttpError:
    return HttpError(
        401,
        f"{why}: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _given_keys(headers: Headers) -> tuple[str, str]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")


def _matches(headers: Headers, keys: Sequence[bytes]) -> bool:
    given = [text.encode() for text in _given_keys(headers)]
    # Every key is compared, each in constant time: neither tells how near a guess was.
    matches = [hmac.compare_digest(g, known) for g in given for known in keys]
    return any(matches)
