"""Taking the port."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.entrypoints.openai.listener import bind_socket, bind_unix_socket, url_of
from vllm.exceptions import ConfigError


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "0.0.0.0"])
def test_a_second_server_on_the_port_fails(host: str | None) -> None:
    with bind_socket(host, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f":{port}"):
            bind_socket(host, port)
        with socket.create_connection(("127.0.0.1", port), timeout=60):
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
        assert url_of(listener, None, "https") == f"https://localhost:{port}"


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A path short enough for a Unix socket, wherever temporary folders are."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield str(Path(folder) / "s")


def test_a_unix_socket(socket_path: str) -> None:
    with bind_unix_socket(socket_path) as listener:
        assert url_of(listener, None) == f"unix:{socket_path}:http://localhost"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_path)
        with pytest.raises(ConfigError, match=socket_path):
            bind_unix_socket(socket_path)


def test_what_a_dead_server_left_is_replaced(socket_path: str) -> None:
    bind_unix_socket(socket_path).close()
    assert Path(socket_path).is_socket()
    with bind_unix_socket(socket_path), socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path)


def test_a_file_that_is_no_socket_stays(socket_path: str) -> None:
    Path(socket_path).write_text("precious")
    with pytest.raises(ConfigError, match="another path"):
        bind_unix_socket(socket_path)
    assert Path(socket_path).read_text() == "precious"
