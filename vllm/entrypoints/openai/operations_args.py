"""Settings of how the server is run: sockets, TLS, logs, keep-alive."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from vllm.exceptions import ConfigError

MAX_API_SERVERS = 64
_CERT_REQS = tuple(int(value) for value in ssl.VerifyMode)


@dataclass(frozen=True, slots=True)
class TlsArgs:
    """TLS of the server; off without a certificate.

    Attributes:
        certfile: Its certificate, with the chain, as PEM.
        keyfile: The certificate's key; None: it is in ``certfile``.
        ca_certs: Certificates that clients' ones are checked against.
        cert_reqs: 0: clients need no certificate, 1: one that is sent is checked, 2: they do.
        refresh: Whether certificate and key are read again when their files change.
    """

    keyfile: str | None = None
    certfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = 0
    ciphers: str = "TLSv1"
    refresh: bool = False

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
        if self.cert_reqs not in _CERT_REQS:
            raise ConfigError(f"--ssl-cert-reqs {self.cert_reqs} must be 0, 1 or 2.")
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
    """How the server is run.

    Attributes:
        uds: Path of a Unix socket to listen on, instead of host and port.
        root_path: Path under which a proxy shows this server; the proxy may strip it or not.
        tls: Certificates.
        disable_access_log: Whether requests leave no line in the log.
        quiet_endpoints: Paths whose requests leave none.
        keep_alive_s: Seconds of silence after which a stream gets a comment; 0: never.
        guards_metrics: Whether ``/metrics`` needs the API key too.
        api_server_count: Processes that answer HTTP, all of them on one socket.
        admin_key: Opens everything, and alone the operator's routes; None: these are like others,
            or not there.
        shows_metrics: Whether answers tell where their time went.
    """

    uds: str | None = None
    root_path: str = ""
    tls: TlsArgs = field(default_factory=TlsArgs)
    disable_access_log: bool = False
    quiet_endpoints: tuple[str, ...] = ()
    keep_alive_s: float = 0.0
    guards_metrics: bool = False
    api_server_count: int = 1
    admin_key: str | None = None
    shows_metrics: bool = False

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path {self.root_path!r} must begin with / and not end with it: /api/llm."
            )
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ConfigError(
                f"--api-server-count {self.api_server_count} is out of range: use 1 to "
                f"{MAX_API_SERVERS}."
            )
        if self.admin_key == "":
            raise ConfigError("--admin-api-key is empty: leave it out or give a real key.")
        if not 0 <= self.keep_alive_s < float("inf"):
            raise ConfigError(
                f"--sse-keep-alive-interval {self.keep_alive_s:g} must be a number of seconds, at "
                "least 0."
            )
