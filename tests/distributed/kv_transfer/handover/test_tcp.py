"""Both sides over real sockets on the loopback interface."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.transfer_engines import GROUPS, MANIFEST
from tests.distributed.kv_transfer.handover.builders import HOLDER, ME, Engines
from tests.ports import free_ports
from vllm.distributed.kv_transfer.handover import tcp
from vllm.distributed.kv_transfer.handover.frames import Head, Kind
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.peers import PeerCheck
from vllm.distributed.kv_transfer.handover.pulling import Conversation, PullTimeouts
from vllm.distributed.kv_transfer.handover.regions import list_regions
from vllm.distributed.kv_transfer.handover.serving import find_block
from vllm.distributed.kv_transfer.handover.sockets import connect, listen
from vllm.distributed.kv_transfer.handover.tcp import TcpHolder, TcpPuller, exchange_hello
from vllm.exceptions import ConfigError
from vllm.v1.core.pool.exports import PrefixBlocks

_WAIT_S = 30.0


class RealTime(Engines):
    """Engines whose time is the machine's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now = time.monotonic()


@pytest.fixture
def engines() -> RealTime:
    return RealTime()


@pytest.fixture
def puller() -> Iterator[TcpPuller]:
    puller = TcpPuller()
    yield puller
    puller.shutdown()


@pytest.fixture
def port(engines: RealTime) -> Iterator[int]:
    """A holder's port."""
    port = free_ports()
    holder = TcpHolder("127.0.0.1", port, engines.serving)
    yield port
    holder.shutdown()


def finish(puller: TcpPuller, *conversations: Conversation) -> None:
    """Wait until conversations have ended."""
    deadline = time.monotonic() + _WAIT_S
    left = set(map(id, conversations))
    while left:
        assert time.monotonic() < deadline, "a conversation does not end"
        left -= {id(conversation) for conversation in puller.take_ended()}
        time.sleep(0.002)


def assert_moves(engines: RealTime, puller: TcpPuller, lease: str, port: int) -> None:
    """A prefix is offered and fetched."""
    engines.offer(lease, prompt=1)
    load, _ = engines.load(lease, port=port)
    puller.begin(load)
    finish(puller, load)
    assert load.outcome is not None
    assert load.outcome.succeeded


def rows_taken(engines: RealTime, blocks: PrefixBlocks) -> list[memoryview]:
    """Where a load's rows go."""
    return [
        piece
        for region in list_regions(GROUPS, blocks.num_tokens, blocks.dense_from)
        for piece in engines.taking.target(
            region, find_block(blocks.bases, blocks.block_ids, region)
        )
    ]


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_prefixes_come_one_after_the_other(engines: RealTime, puller: TcpPuller, port: int) -> None:
    loads = []
    for prompt in range(3):
        engines.offer(f"lease-{prompt}", prompt, num_tokens=64)
        loads.append(engines.load(f"lease-{prompt}", num_tokens=64, port=port))
        puller.begin(loads[-1][0])
    returning = engines.returning("lease-0", port)
    puller.begin(returning)
    finish(puller, returning, *(load for load, _ in loads))
    for prompt, (load, blocks) in enumerate(loads):
        assert load.outcome is not None
        assert load.outcome.succeeded, load.outcome
        assert engines.has_rows(blocks, prompt)
    assert engines.leases.collect() == {"lease-0"}


def test_nobody_listens(engines: RealTime, puller: TcpPuller) -> None:
    load, _ = engines.load("a", port=free_ports(), timeouts=PullTimeouts(0.2, 0.2))
    puller.begin(load)
    finish(puller, load)
    assert load.outcome is not None
    assert not load.outcome.succeeded


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
def test_what_waits_for_an_answer_ends_soon(how: str, engines: RealTime) -> None:
    # A peer that accepts and says nothing.
    puller = TcpPuller()
    with listen("127.0.0.1", 0) as mute:
        load, _ = engines.load("a", port=mute.getsockname()[1], timeouts=PullTimeouts(600, 600))
        puller.begin(load)
        connection, _ = mute.accept()
        assert connection.recv(1), "it was greeted, and waits"
        if how == "cancelled":
            load.fail("the request ended")
        else:
            puller.shutdown()
        finish(puller, load)
        connection.close()
    assert load.outcome is not None
    wanted = "the request ended" if how == "cancelled" else "the engine is shutting down"
    assert load.outcome.reason.endswith(wanted)
    puller.shutdown()


def test_a_mute_peer_is_given_up(engines: RealTime, puller: TcpPuller) -> None:
    with listen("127.0.0.1", 0) as mute:
        load, _ = engines.load("a", port=mute.getsockname()[1], timeouts=PullTimeouts(0.1, 0.2))
        puller.begin(load)
        finish(puller, load)
        assert load.outcome is not None
        assert not load.outcome.succeeded


class Meddler:
    """A relay that changes what the holder answers, connection by connection."""

    def __init__(self, port: int, meddle: Callable[[int, bytes], bytes | None]) -> None:
        self._target = port
        self._meddle = meddle
        self._listener = listen("127.0.0.1", 0)
        self.port = int(self._listener.getsockname()[1])
        self.num_connections = 0
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            number, self.num_connections = self.num_connections, self.num_connections + 1
            self._connections += (client, server)
            for arguments in ((client, server, None), (server, client, number)):
                self._start(self._pump, *arguments)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        try:
            while data := source.recv(512):
                changed = data if number is None else self._meddle(number, data)
                if changed is None:
                    break
                sink.sendall(changed)
        except OSError:
            pass  # the other direction has ended
        for connection in (source, sink):
            with contextlib.suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_WAIT_S)
        for connection in self._connections:
            connection.close()


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 16])


@pytest.mark.parametrize(
    ("name", "meddle"),
    [
        ("changed on the first connection", lambda n, data: _flip(data) if n == 0 else data),
        ("closed twice", lambda n, data: None if n < 2 else data),
        ("cut in the middle", lambda n, data: data[: len(data) // 2] if n < 2 else data),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bad_line_is_survived(
    engines: RealTime,
    puller: TcpPuller,
    port: int,
    name: str,
    meddle: Callable[[int, bytes], bytes | None],
) -> None:
    relay = Meddler(port, meddle)
    engines.offer("a", prompt=9, num_tokens=256)
    load, blocks = engines.load("a", 256, port=relay.port, timeouts=PullTimeouts(0.3, 20.0))
    puller.begin(load)
    finish(puller, load)
    puller.shutdown()
    relay.close()
    assert load.outcome is not None
    assert load.outcome.succeeded, (name, load.outcome)
    assert relay.num_connections >= 2
    assert engines.has_rows(blocks, prompt=9)


def test_engines_are_compared_at_start(
    engines: RealTime, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    PeerCheck(ME, [("127.0.0.1", port)]).run()
    other = Hello({**MANIFEST, "weights": "abc"}, "puller", "run-x")
    with pytest.raises(ConfigError, match=r"weights is .* at engine holder and 'abc' at engine"):
        PeerCheck(other, [("127.0.0.1", port)]).run()
    # "Stalls at start until both are up": one that is not up yet is no reason not to start.
    PeerCheck(other, [("127.0.0.1", free_ports())]).run()


def test_greetings_go_both_ways(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        assert exchange_hello(connection, ME, _WAIT_S) == (Kind.WELCOME, "")
    assert HOLDER.manifest == ME.manifest


# The last one is the second rank's, where the first one's port is the last there is.
@pytest.mark.parametrize(
    ("host", "port"), [("a..b", 5), ("x" * 70 + ".example", 5), ("127.0.0.1", 65536)]
)
def test_an_address_that_cannot_be_one_ends_the_load(
    engines: RealTime, puller: TcpPuller, host: str, port: int
) -> None:
    # Requests name the address: it must not end the thread that serves others.
    timeouts = PullTimeouts(0.1, 0.1)
    for _ in range(2):
        load, _ = engines.load("a", port=port, timeouts=timeouts)
        load.remote = replace(load.remote, host=host)
        puller.begin(load)
        finish(puller, load)
        assert load.outcome is not None
        assert "no engine can be there" in load.outcome.reason


def test_what_waits_for_a_dead_holder_ends_with_the_first_that_tried(
    engines: RealTime, puller: TcpPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    # "Stalls when a peer dies": a machine that is gone refuses nothing, each try takes seconds.
    are_queued, tried = threading.Event(), []

    def nobody_answers(address: tuple[str, int]) -> socket.socket:
        assert are_queued.wait(_WAIT_S)
        tried.append(address)
        raise TimeoutError("timed out")

    monkeypatch.setattr(tcp, "connect", nobody_answers)
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 2 * _WAIT_S)
    loads = [engines.load("a", num_tokens=32, timeouts=PullTimeouts(5.0, 0.0))[0] for _ in range(4)]
    for load in loads:
        puller.begin(load)
    are_queued.set()
    finish(puller, *loads)
    assert len(tried) == 1
    assert all(load.outcome is not None and not load.outcome.succeeded for load in loads)


def test_the_deadline_holds_while_a_name_is_looked_up(
    engines: RealTime, puller: TcpPuller, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_resolving, may_go_on = threading.Event(), threading.Event()

    def resolve_slowly(address: tuple[str, int]) -> socket.socket:
        is_resolving.set()
        assert may_go_on.wait(_WAIT_S)
        return connect(address)

    monkeypatch.setattr(tcp, "connect", resolve_slowly)
    engines.offer("a", prompt=1)
    (first, blocks), (second, _) = (engines.load("a", port=port) for _ in range(2))
    before = [bytes(piece) for piece in rows_taken(engines, blocks)]
    for load in (first, second):
        puller.begin(load)
    assert is_resolving.wait(_WAIT_S)
    assert not first.has_ended(engines.now)
    # The first waits for the name server, the second for the first.
    for load in (first, second):
        assert load.has_ended(engines.now + 20.0)
        assert load.outcome is not None
        assert "deadline" in load.outcome.reason
    may_go_on.set()
    finish(puller, first, second)
    # The blocks may be another request's by now.
    assert [bytes(piece) for piece in rows_taken(engines, blocks)] == before


def test_a_thread_that_breaks_leaves_nobody_waiting(
    engines: RealTime, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = []
    monkeypatch.setattr(threading, "excepthook", lambda args: broken.append(args.exc_value))
    puller = TcpPuller()
    first, second = engines.load("a", port=port)[0], engines.load("b", port=port)[0]

    is_queued = threading.Event()

    def break_down(**_: object) -> list[Any]:
        assert is_queued.wait(_WAIT_S)
        raise KeyError("a bug")

    monkeypatch.setattr(first, "connected", break_down)
    puller.begin(first)
    puller.begin(second)
    is_queued.set()
    finish(puller, first, second)
    assert [repr(error) for error in broken] == ["KeyError('a bug')"]
    engines.offer("c", prompt=4)
    third, blocks = engines.load("c", port=port)
    puller.begin(third)
    finish(puller, third)
    assert third.outcome is not None
    assert third.outcome.succeeded, third.outcome
    assert engines.has_rows(blocks, prompt=4)
    puller.shutdown()


def test_a_holder_that_was_shut_down_listens_no_more(engines: RealTime) -> None:
    port = free_ports()
    holder = TcpHolder("127.0.0.1", port, engines.serving)
    connection = connect(("127.0.0.1", port))
    wait_for(lambda: bool(holder._connections))
    holder.shutdown()
    assert not holder._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        connect(("127.0.0.1", port))
    connection.settimeout(_WAIT_S)
    assert connection.recv(1) == b"", "those that were connected are let go"
    connection.close()
    holder.shutdown()


def test_a_holder_that_is_asked_nothing_costs_no_thread(
    engines: RealTime, puller: TcpPuller, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_IDLE_S", 0.01)
    for lease in "ab":
        assert_moves(engines, puller, lease, port)
        wait_for(lambda: not any(t.name.startswith("kv-puller") for t in threading.enumerate()))


def test_strangers_cannot_make_a_holder_wait_or_store(
    engines: RealTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_GREETING_S", 0.1)
    monkeypatch.setattr(tcp, "_MAX_CONNECTIONS", 3)
    port = free_ports()
    holder = TcpHolder("127.0.0.1", port, engines.serving)
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=_WAIT_S) as silent:
        assert silent.recv(1) == b"", "it says nothing"
    monkeypatch.setattr(tcp, "_GREETING_S", _WAIT_S)
    with socket.create_connection(address, timeout=_WAIT_S) as greedy:
        greedy.sendall(Head(Kind.ROWS, 0, 0, 2**32 - 1, bytes(8)).pack())
        assert greedy.recv(1) == b"", "nobody asked for its four GiB"
    with contextlib.ExitStack() as stack:
        known = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        for connection in known:
            assert exchange_hello(connection, ME, _WAIT_S)[0] is Kind.WELCOME
        one_more = stack.enter_context(socket.create_connection(address, timeout=_WAIT_S))
        assert one_more.recv(1) == b"", "there are enough"
    holder.shutdown()


def test_accepting_goes_on_after_an_error_that_passes(
    engines: RealTime, puller: TcpPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(errno.EMFILE, "too many files"), OSError(errno.ECONNABORTED, "gone")]

    class Listener:
        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener
            self.shutdown, self.close = listener.shutdown, listener.close

        def accept(self) -> Any:
            if errors:
                raise errors.pop()
            return self._listener.accept()

    monkeypatch.setattr(tcp, "listen", lambda host, port: Listener(listen(host, port)))
    port = free_ports()
    holder = TcpHolder("127.0.0.1", port, engines.serving)
    assert_moves(engines, puller, "a", port)
    assert not errors
    holder.shutdown()


def test_what_is_no_engine_is_let_go(port: int, engines: RealTime, puller: TcpPuller) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # as good
            assert stranger.recv(100) == b""
    assert_moves(engines, puller, "a", port)
