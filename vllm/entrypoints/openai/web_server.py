"""uvicorn's settings: TLS, logs, limits."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.entrypoints.openai.operations_args import TlsArgs
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

# Longer ones are for the parser to refuse.
_MAX_REQUEST_LINE = 64 * 1024
# How often a certificate's files are looked at.
_REFRESH_INTERVAL_S = 2.0


class SignalFreeServer(uvicorn.Server):
    """uvicorn without its signal handlers: a drain must begin while it still accepts."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to others."""
        yield


class VersionedProtocol(HttpToolsProtocol):
    """httptools, and h11 for a connection that begins with HTTP/1.0.

    Clients of HTTP/1.0 read no chunks: what has no length ends with their connection, which only
    the slower h11 does.
    """

    # The request line, until all of it is there; None once that was judged.
    _request_line: bytes | None = b""

    def data_received(self, data: bytes) -> None:
        """Take what the client sent."""
        if self._request_line is not None:
            data = self._request_line + data
            line, ended, _ = data.partition(b"\n")
            if not ended and len(line) < _MAX_REQUEST_LINE:
                self._request_line = data
                return
            self._request_line = None
            if line.rstrip().endswith(b" HTTP/1.0"):
                self._hand_over(data)
                return
        super().data_received(data)

    def _hand_over(self, data: bytes) -> None:
        self.connections.discard(self)
        successor = H11Protocol(self.config, self.server_state, self.app_state)
        successor.connection_made(self.transport)
        self.transport.set_protocol(successor)
        successor.data_received(data)


class _QuietEndpoints(logging.Filter):
    """Drops access lines of some paths."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Judge one line; uvicorn's arguments are client, method, path, version, status."""
        if not isinstance(record.args, tuple) or len(record.args) < 3:
            return True
        return str(record.args[2]).partition("?")[0] not in self._paths


# Idle connections are the client's to close: what it sends while the server closes is lost, and the
# client sees an error. Clients keep theirs for 4 or 5 seconds, proxies for 60.
KEEP_ALIVE_S = 75


def make_uvicorn_config(app: Any, args: ServerArgs, *, close_timeout_s: int) -> uvicorn.Config:
    """Return uvicorn's configuration; ``load_config`` is due once its application is there."""
    operations = args.operations
    tls = operations.tls
    config = uvicorn.Config(
        app=app,
        http=VersionedProtocol,
        # Ours stands on the logger "uvicorn" already, so that all lines look alike.
        log_config=None,
        log_level=args.uvicorn_log_level,
        access_log=not operations.disable_access_log,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=close_timeout_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_keyfile=tls.keyfile,
        ssl_certfile=tls.certfile,
        ssl_ca_certs=tls.ca_certs,
        ssl_cert_reqs=tls.cert_reqs,
        ssl_ciphers=tls.ciphers,
    )
    if operations.quiet_endpoints:
        logging.getLogger("uvicorn.access").addFilter(_QuietEndpoints(operations.quiet_endpoints))
    return config


def load_config(config: uvicorn.Config, tls: TlsArgs) -> None:
    """Load what the configuration names, certificates among it.

    Raises:
        ConfigError: A certificate or key cannot be used.
    """
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {tls.certfile} and --ssl-keyfile {tls.keyfile} cannot be used: {error}"
        ) from error


def start_tls_refresh(config: uvicorn.Config, tls: TlsArgs) -> "asyncio.Task[None] | None":
    """Follow the certificate's files, if that was asked for; new connections get what is there."""
    if not tls.refresh or config.ssl is None:
        return None
    return asyncio.create_task(_follow(config.ssl, tls))


async def _follow(context: ssl.SSLContext, tls: TlsArgs) -> None:
    seen = _stamps(tls)
    while True:
        await asyncio.sleep(_REFRESH_INTERVAL_S)
        now = _stamps(tls)
        if now == seen:
            continue
        assert tls.certfile is not None
        try:
            context.load_cert_chain(tls.certfile, tls.keyfile)
        except (OSError, ssl.SSLError) as error:
            # Perhaps only one of the two is written so far: the old ones serve until both fit.
            logger.warning("The new certificate cannot be used yet: %s", error)
            continue
        seen = now
        logger.info("The certificate %s was read again.", tls.certfile)


def _stamps(tls: TlsArgs) -> list[tuple[int, int]]:
    """What changes when a file does: time and inode of each that exists."""
    paths = [Path(path) for path in (tls.certfile, tls.keyfile) if path is not None]
    return [(s.st_mtime_ns, s.st_ino) for path in paths if path.exists() for s in (path.stat(),)]
