"""The listening socket, taken before anything slow begins."""

import socket

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


def _bind_all(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)


def url_of(listener: socket.socket, host: str | None) -> str:
    """Return the URL a client on this machine can use."""
    port = listener.getsockname()[1]
    name = "localhost" if host in (None, "", "0.0.0.0", "::") else str(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
