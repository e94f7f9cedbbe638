"""Settings of how the server is run: sockets, TLS, logs, keep-alive."""

import math
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from vllm.config.options import Limit, check_options, option, within
from vllm.exceptions import ConfigError

MAX_API_SERVERS = 64
_CERT_REQS = tuple(int(value) for value in ssl.VerifyMode)
_GROUP = "operations"


def _paths(text: str) -> tuple[str, ...]:
    """Parse "/health,/metrics"."""
    return tuple(path.strip() for path in text.split(",") if path.strip())


@dataclass(frozen=True, slots=True)
class TlsArgs:
    """TLS of the server; off without a certificate."""

    certfile: str | None = option(
        None,
        "TLS: the certificate chain, PEM.",
        group=_GROUP,
        flag="--ssl-certfile",
        metavar="FILE",
    )
    keyfile: str | None = option(
        None,
        "TLS: the certificate's key, PEM.",
        group=_GROUP,
        flag="--ssl-keyfile",
        metavar="FILE",
        more="Unset: it is in the certificate's file.",
    )
    ca_certs: str | None = option(
        None,
        "TLS: what clients' certificates are checked with.",
        group=_GROUP,
        flag="--ssl-ca-certs",
        metavar="FILE",
    )
    cert_reqs: int = option(
        0,
        "TLS: 2: clients need a certificate, 1: one that is sent is checked. Default: 0.",
        group=_GROUP,
        flag="--ssl-cert-reqs",
        parse=int,
        metavar="{0,1,2}",
        limit=Limit(lambda value: value in _CERT_REQS, "must be 0, 1 or 2."),
    )
    ciphers: str = option(
        "TLSv1", "TLS: OpenSSL's list of ciphers.", group=_GROUP, flag="--ssl-ciphers"
    )
    refresh: bool = option(
        False,
        "TLS: read certificate and key again when they change.",
        group=_GROUP,
        flag="--enable-ssl-refresh",
    )

    def __post_init__(self) -> None:
        files = {
            "--ssl-keyfile": self.keyfile,
            "--ssl-certfile": self.certfile,
            "--ssl-ca-certs": self.ca_certs,
        }
        for flag, path in files.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag} {path}: there is no such file.")
        if self.certfile is None and (self.keyfile or self.ca_certs or self.refresh):
            raise ConfigError("TLS needs a certificate: give --ssl-certfile too.")
        check_options(self, by_flag=True)
        if self.cert_reqs and self.ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.cert_reqs} needs --ssl-ca-certs: nothing else says which "
                "clients' certificates are good."
            )

    @property
    def is_on(self) -> bool:
        """Whether the server speaks TLS."""
        return self.certfile is not None


@dataclass(frozen=True, slots=True)
class OperationsArgs:
    """How the server is run."""

    uds: str | None = option(
        None, "Listen on a Unix socket, not on a port.", group=_GROUP, metavar="PATH"
    )
    root_path: str = option(
        "",
        "Path under which a proxy shows this server, such as /api/llm.",
        group=_GROUP,
        metavar="PATH",
        limit=Limit(
            lambda path: not path or (path.startswith("/") and not path.endswith("/")),
            "must begin with / and not end with it: /api/llm.",
        ),
        more="The proxy may strip it or not.",
    )
    tls: TlsArgs = field(default_factory=TlsArgs)
    keep_alive_s: float = option(
        0.0,
        "Send a comment on a stream that was silent for so long. Default: 0, never.",
        group=_GROUP,
        flag="--sse-keep-alive-interval",
        metavar="SECONDS",
        limit=Limit(
            lambda seconds: 0 <= seconds < math.inf, "must be a number of seconds, at least 0."
        ),
    )
    api_server_count: int = option(
        1,
        "Processes that answer HTTP, all on one socket and for the same engine cores. Default: 1.",
        group=_GROUP,
        also=("-asc",),
        parse=int,
        metavar="N",
        limit=within(1, MAX_API_SERVERS),
        more="See `docs/data_parallel.md`.",
    )
    admin_key: str | None = option(
        None,
        "The operator's key: opens everything, and it alone /reset_prefix_cache, /server_info, "
        "/cache/events and /v1/cache/*, which are there then.",
        group=_GROUP,
        flag="--admin-api-key",
        metavar="KEY",
    )
    shows_metrics: bool = option(
        False,
        "Tell in every completion and chat where its time went (metrics).",
        group=_GROUP,
        flag="--enable-per-request-metrics",
    )
    guards_metrics: bool = option(
        False, "Ask for the API key on /metrics too.", group=_GROUP, flag="--guard-metrics"
    )
    serves_page: bool = option(
        True,
        "Show a page at / and /cache: a chat, and the cache beside it. Default: on.",
        group=_GROUP,
        flag="--ui",
        more="See `docs/cache_page.md`.",
    )
    disable_access_log: bool = option(
        False,
        "Log no line for each request.",
        group=_GROUP,
        flag="--disable-uvicorn-access-log",
    )
    quiet_endpoints: tuple[str, ...] = option(
        (),
        "Log no line for requests to these paths: /health,/metrics.",
        group=_GROUP,
        flag="--disable-access-log-for-endpoints",
        parse=_paths,
        metavar="PATHS",
    )

    def __post_init__(self) -> None:
        check_options(self, by_flag=True)
        if self.admin_key == "":
            raise ConfigError("--admin-api-key is empty: leave it out or give a real key.")
