"""Pictures from other hosts: off unless the operator lists hosts, and then by narrow rules.

    url -> listed host -> its addresses, once, all of them public -> that very address -> at most
    3 redirects, each from the start of this line -> at most 20 MiB within 5 seconds

A server that fetches what strangers name is their way into its own network: a name may mean a
private address, mean one only when it is asked the second time, or redirect to one. So a name is
resolved once and the address that was checked is the one that is connected to. No proxies, no
cookies. Whatever goes wrong behind the list of hosts is told in one text, as the difference between
a closed port and a silent one would be a map of the network.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from vllm.exceptions import UserInputError
from vllm.logger import init_logger
from vllm.multimodal.decode import MAX_FILE_BYTES

logger = init_logger(__name__)

_MAX_REDIRECTS = 3
_TIMEOUT_S = 5.0
_CHUNK_BYTES = 1 << 16
# Names that are looked up at a time, those whose fetch has given up included.
_MAX_RESOLVING = 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
ANY_HOST = "*"


class _RefusedError(Exception):
    """Why a picture is not fetched; told to the log alone."""


@dataclass(frozen=True, slots=True)
class _Place:
    """An address, in parts."""

    scheme: str
    host: str
    port: int
    target: str


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host.

    Raises:
        OSError: It has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Return whether an address is one of the public internet, whatever it is written as."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = [parsed.ipv4_mapped, parsed.sixtofour, *(parsed.teredo or ())]
        if parsed in _NAT64:
            inner.append(ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF))
        if any(found is not None and not is_public(str(found)) for found in inner):
            return False
        if parsed.ipv4_mapped is not None:
            return True
        if parsed.is_site_local:
            return False
    return parsed.is_global and not parsed.is_multicast and not parsed.is_unspecified


class _Resolver:
    """Asks for addresses, and waits no longer than it may: the system's own call has no end.

    Owns: the threads that are still asking, of which there are so many at most.

    Args:
        resolve: Returns the addresses of a host and port; waits.
    """

    def __init__(self, resolve: Callable[[str, int], Sequence[str]]) -> None:
        self._resolve = resolve
        self._free = threading.BoundedSemaphore(_MAX_RESOLVING)

    def find(self, host: str, port: int, deadline: float) -> Sequence[str]:
        """Return the addresses of a host.

        Raises:
            OSError: It has none, or they are not here in time.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError("names are slow")
        answer: Future[Sequence[str]] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._resolve(host, port))
            except (OSError, UnicodeError) as error:
                answer.set_exception(error)
            finally:
                self._free.release()

        try:
            threading.Thread(target=ask, name="resolves", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise OSError(f"no thread can be started: {error}") from error
        return answer.result(max(0.0, deadline - time.monotonic()))


class ImageFetcher:
    """Fetches pictures from the hosts that an operator lists.

    Args:
        hosts: Exact names; "*": all that are public.
        resolve: Returns the addresses of a host and port.
        allows: Whether an address may be connected to.
        timeout_s: Seconds in all, redirects included.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        resolve: Callable[[str, int], Sequence[str]] = resolve,
        allows: Callable[[str], bool] = is_public,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._resolver = _Resolver(resolve)
        self._allows = allows
        self._timeout_s = timeout_s

    def check(self, url: str) -> None:
        """Refuse an address whose host is not listed, before anything is asked.

        Raises:
            UserInputError: It is malformed, or not listed.
        """
        if not self._hosts:
            raise UserInputError(
                "is on another host, and this server fetches nothing: send the picture itself "
                "(data:image/png;base64,...), or start the server with --allowed-media-domains",
                "messages",
            )
        place = _split(url)
        if place is None:
            raise UserInputError(f"has the malformed url {url[:80]!r}", "messages")
        if not self._lists(place.host):
            raise UserInputError(
                f"is on {place.host[:80]!r}, which --allowed-media-domains does not list",
                "messages",
            )

    def fetch(self, url: str) -> bytes:
        """Return what lies at an address; waits, so call it in a thread.

        Raises:
            UserInputError: It is not listed, or cannot be had.
        """
        self.check(url)
        deadline = time.monotonic() + self._timeout_s
        try:
            return self._follow(url, deadline)
        except (OSError, ValueError, http.client.HTTPException, _RefusedError) as error:
            logger.debug("A picture was not fetched from %.100s: %s", url, error)
            raise UserInputError(
                f"cannot be fetched from {url[:80]!r}: it is not there, not public, above "
                f"{MAX_FILE_BYTES >> 20} MiB, or not here within {self._timeout_s:g} s",
                "messages",
            ) from error

    def _lists(self, host: str) -> bool:
        return ANY_HOST in self._hosts or host in self._hosts

    def _follow(self, url: str, deadline: float) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            place = _split(url)
            if place is None or not self._lists(place.host):
                raise _RefusedError(f"redirected to {url[:100]!r}")
            body = self._get(place, deadline)
            if isinstance(body, bytes):
                return body
            url = urllib.parse.urljoin(url, body)
        raise _RefusedError("too many redirects")

    def _get(self, place: _Place, deadline: float) -> bytes | str:
        """What one host answers: a body, or where to look instead."""
        addresses = self._resolver.find(place.host, place.port, deadline)
        if not addresses or not all(map(self._allows, addresses)):
            raise _RefusedError(f"{place.host} is not public: {addresses}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("late")
        connection = socket.create_connection((addresses[0], place.port), timeout=left)
        # A host that sends a byte a second never exceeds a timeout of its own: the end comes from
        # outside.
        if place.scheme == "https":
            # Its certificate is that of the name, though its address was asked.
            connection = self._tls.wrap_socket(
                connection, server_hostname=place.host, do_handshake_on_connect=False
            )
        end = threading.Timer(max(deadline - time.monotonic(), 0.0), _hang_up, [connection])
        end.daemon = True
        end.start()
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            answer = self._ask(place, connection)
            # What was hung up on reads as a short answer.
            if time.monotonic() >= deadline:
                raise TimeoutError("late")
            return answer
        finally:
            end.cancel()
            connection.close()

    def _ask(self, place: _Place, connection: socket.socket) -> bytes | str:
        client = http.client.HTTPConnection(place.host, place.port)
        client.sock = connection
        try:
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
            client.request("GET", place.target, headers=headers)
            response = client.getresponse()
            if response.status in _REDIRECTS:
                return str(response.headers["Location"] or "")
            if response.status != http.HTTPStatus.OK:
                raise _RefusedError(f"status {response.status}")
            return _read(response)
        finally:
            client.close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


def _read(response: http.client.HTTPResponse) -> bytes:
    data = bytearray()
    while chunk := response.read(_CHUNK_BYTES):
        data += chunk
        if len(data) > MAX_FILE_BYTES:
            raise _RefusedError("too large")
    if response.length:
        raise _RefusedError("cut off")
    return bytes(data)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It has ended already.
        return


def _split(url: str) -> _Place | None:
    """The parts of an address; None: it is none that is fetched."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").rstrip(".").encode("idna").decode()
    except (ValueError, UnicodeError):
        return None
    if parts.scheme not in _PORTS or not host or parts.username is not None:
        return None
    target = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return _Place(parts.scheme, host, port or _PORTS[parts.scheme], target)
