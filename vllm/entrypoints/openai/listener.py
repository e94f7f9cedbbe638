"""The listening socket, taken before anything slow begins."""

import socket
from pathlib import Path

from vllm.exceptions import ConfigError

_BACKLOG = 2048


def bind_socket(host: str | None, port: int) -> socket.socket:
    """Return a socket that listens already: a second server on the port fails at once.

    Clients that connect before the web server runs wait in the backlog for a moment.

    Args:
        host: Name or address; None: all addresses, IPv6 too where there is one.
        port: 0: any free one.

    Raises:
        ConfigError: The address is taken, not ours or unknown.
    """
    try:
        if host is None or host in ("", "::"):
            return _bind_all(port)
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host or '*'}:{port}: {error.strerror or error}. Choose another "
            "--port or --host, or stop the program that uses it."
        ) from error


def bind_unix_socket(path: str) -> socket.socket:
    """Return a Unix socket that listens already; a dead server's left-over file is replaced.

    Raises:
        ConfigError: Somebody listens there, or the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on --uds {path}: {error.strerror or error}. Choose another path, or "
            "stop the program that uses it."
        ) from error
    return listener


def _remove_dead_socket(path: str) -> None:
    """Remove a socket's file that nobody listens on; a living one makes ``bind`` fail."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def _bind_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def url_of(listener: socket.socket, host: str | None, scheme: str = "http") -> str:
    """Return the URL a client on this machine can use; of a Unix socket, its path in front."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}:{scheme}://localhost"
    port = listener.getsockname()[1]
    name = "localhost" if host in (None, "", "0.0.0.0", "::") else str(host)
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
