"""Another host is asked only as an operator lists it, and never for what lies inside a network."""

import http.server
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from vllm.exceptions import UserInputError
from vllm.multimodal.decode import MAX_FILE_BYTES
from vllm.multimodal.fetch import ImageFetcher, is_public, resolve

_HOST = "pictures.example"


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the path says."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        name, _, rest = self.path.lstrip("/").partition("/")
        if name == "to":
            self.send_response(302)
            self.send_header("Location", rest if "://" in rest else f"/{rest}")
            self.end_headers()
            return
        if name == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        if name == "cut":
            self.send_header("Content-Length", "100")
        self.end_headers()
        if name == "huge":
            for _ in range(MAX_FILE_BYTES // 2**20 + 2):
                self.wfile.write(b"\0" * 2**20)
        elif name == "slow":
            while True:  # until the client has gone
                self.wfile.write(b"x")
                time.sleep(0.01)
        else:
            self.wfile.write(b"a picture")

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.seen = []  # type: ignore[attr-defined]
    server.daemon_threads = True
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def _fetcher(hosts: Sequence[str] = (_HOST,), timeout_s: float = 5.0, **rest: Any) -> ImageFetcher:
    """Every host is this machine, which is taken for a public one."""
    rest = {"resolve": lambda host, port: ["127.0.0.1"], "allows": lambda a: True, **rest}
    return ImageFetcher(hosts, timeout_s=timeout_s, **rest)


def _url(server: Any, path: str = "ok", host: str = _HOST) -> str:
    return f"http://{host}:{server.server_port}/{path}"


def test_a_listed_host_is_asked_by_its_name_without_cookies(server: Any) -> None:
    assert _fetcher().fetch(_url(server, "ok?a=1 2")) == b"a picture"

    path, headers = server.seen[-1]
    assert path == "/ok?a=1%202"
    assert headers["Host"] == f"{_HOST}:{server.server_port}"
    assert headers["Accept"] == "image/*"
    assert "Cookie" not in headers


@pytest.mark.parametrize("hosts", [(), ("other.example",), (f"sub.{_HOST}",)])
def test_what_is_not_listed_is_never_asked(server: Any, hosts: tuple[str, ...]) -> None:
    asked = len(server.seen)
    names: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        names.append(host)
        return ["127.0.0.1"]

    with pytest.raises(UserInputError, match="--allowed-media-domains"):
        _fetcher(hosts, resolve=resolve).fetch(_url(server))
    assert (len(server.seen), names) == (asked, [])


def test_a_star_lists_every_host(server: Any) -> None:
    assert _fetcher(("*",)).fetch(_url(server, host="any.example")) == b"a picture"


def test_a_name_of_a_private_address_is_not_asked(server: Any) -> None:
    asked = len(server.seen)
    for addresses in (["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:127.0.0.1"], []):
        fetcher = ImageFetcher(("*",), resolve=lambda host, port, found=addresses: found)
        with pytest.raises(UserInputError, match="cannot be fetched"):
            fetcher.fetch(_url(server))
    assert len(server.seen) == asked


def test_a_name_is_resolved_once_and_the_checked_address_is_asked(server: Any) -> None:
    """A name that means another address the second time gains nothing."""
    answers = iter([["127.0.0.1"], ["10.0.0.1"]])
    fetcher = _fetcher(resolve=lambda host, port: next(answers))

    assert fetcher.fetch(_url(server)) == b"a picture"


def test_redirects_are_checked_as_the_first_address_is(server: Any) -> None:
    fetcher = _fetcher()
    inside = {"inside.example": ["10.0.0.1"], _HOST: ["127.0.0.1"]}
    checking = _fetcher(
        (_HOST, "inside.example"),
        resolve=lambda host, port: inside[host],
        allows=lambda address: address == "127.0.0.1",
    )

    assert fetcher.fetch(_url(server, "to/ok")) == b"a picture"
    assert fetcher.fetch(_url(server, "to/to/to/ok")) == b"a picture"
    for path in ("to/to/to/to/ok", "to/http://127.0.0.1/", "to/file:///etc/passwd"):
        with pytest.raises(UserInputError, match="cannot be fetched"):
            fetcher.fetch(_url(server, path))
    with pytest.raises(UserInputError, match="cannot be fetched"):
        checking.fetch(_url(server, "to/http://inside.example/"))


def test_a_closed_port_a_silent_one_and_a_missing_file_read_alike(server: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        free = socket.create_server(("127.0.0.1", 0))
        closed_port = free.getsockname()[1]
        free.close()
        texts = set()
        for port, path in (
            (silent.getsockname()[1], ""),
            (closed_port, ""),
            (server.server_port, "missing"),
            (server.server_port, "cut"),
        ):
            with pytest.raises(UserInputError) as error:
                _fetcher(timeout_s=0.3).fetch(f"http://{_HOST}:{port}/{path}")
            texts.add(str(error.value).replace(str(port), "PORT").replace(path or "-", ""))
        assert len(texts) == 1


def test_too_much_and_too_late_end(server: Any) -> None:
    with pytest.raises(UserInputError, match="20 MiB"):
        _fetcher().fetch(_url(server, "huge"))
    with pytest.raises(UserInputError):
        _fetcher(timeout_s=0.3).fetch(_url(server, "slow"))


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///x",
        "http://user:key@pictures.example/",
        "http://pictures.example:99999/",
        "http://[::1/",
        "ftp://pictures.example/",
        "http://pictures.example\r\nHost: x/",
        "http://" + "a" * 70 + ".example/",
    ],
)
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(UserInputError):
        _fetcher(resolve=lambda host, port: []).fetch(url)


def test_public_addresses_are_told_from_all_others() -> None:
    public = ("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822")
    others = (
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1"),
        *("::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "fec0::1", "ff02::1", "localhost"),
        *("fe80::1%eth0", "192.0.2.1", "198.18.0.1", "2001:db8::1", ""),
    )

    assert all(map(is_public, public))
    assert [address for address in others if is_public(address)] == []


def test_a_name_that_is_slow_to_resolve_is_given_up() -> None:
    """The system's own call waits for half a minute, and is in nobody's hands."""
    asked, goes_on = threading.Event(), threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        asked.set()
        goes_on.wait(60)
        return ["127.0.0.1"]

    fetcher = _fetcher(resolve=resolve, timeout_s=0.05)
    with pytest.raises(UserInputError, match="not here within"):
        fetcher.fetch(f"http://{_HOST}/a.png")
    assert asked.is_set()
    goes_on.set()


def test_names_of_this_machine_resolve() -> None:
    assert "127.0.0.1" in resolve("127.0.0.1", 80)
