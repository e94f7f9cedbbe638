"""Taking the port."""

import socket

import pytest

from vllm.entrypoints.openai.listener import bind_socket, url_of
from vllm.exceptions import ConfigError


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "0.0.0.0"])
def test_a_second_server_on_the_port_fails(host: str | None) -> None:
    with bind_socket(host, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f":{port}"):
            bind_socket(host, port)
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            pass


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="192\\.0\\.2\\.1"):
        bind_socket("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="no-such-host"):
        bind_socket("no-such-host.invalid", 0)


def test_urls() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, None) == f"http://localhost:{port}"
        assert url_of(listener, "10.0.0.1") == f"http://10.0.0.1:{port}"
        assert url_of(listener, "::1") == f"http://[::1]:{port}"
