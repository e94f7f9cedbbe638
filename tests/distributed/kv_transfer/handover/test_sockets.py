"""Sockets: what cannot be listened on or connected to, and strangers' frames."""

import random
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from vllm.distributed.kv_transfer.handover.frames import FrameError, Head, Kind, control_frame
from vllm.distributed.kv_transfer.handover.sockets import (
    PeerClosedError,
    close,
    connect,
    listen,
    receive_control,
    receive_into,
    send,
)
from vllm.exceptions import ConfigError


@pytest.mark.parametrize("address", ["a..b", "203.0.113.7"])
def test_an_address_of_another_machine_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .* kv_ip"):
        listen(address, 14579)


def test_a_taken_port_is_told() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*kv_port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("address", [("a..b", 5), ("127.0.0.1", 65536), ("127.0.0.1", -1)])
def test_what_is_no_address_is_an_error_of_the_connection(address: tuple[str, int]) -> None:
    with pytest.raises(OSError, match="no engine can be there"):
        connect(address)


def test_control_frames_come_and_rows_do_not() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(theirs, control_frame(Kind.HELLO, b"who"))
        head, payload = receive_control(ours, lambda last: 30.0)
        assert (head.kind, bytes(payload)) == (Kind.HELLO, b"who")
        send(theirs, [Head(Kind.ROWS, 0, 0, 2**32 - 1, bytes(8)).pack()])
        with pytest.raises(FrameError, match="nobody asked for"):
            receive_control(ours, lambda last: 30.0)
        close(theirs)
        with pytest.raises(PeerClosedError):
            receive_control(ours, lambda last: 30.0)
        with pytest.raises(TimeoutError):
            receive_control(ours, lambda last: -1.0)


class SmallBuffers:
    """A connection that takes and gives a few bytes at a time, wherever pieces end."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.data = bytearray()

    def settimeout(self, seconds: float) -> None:
        """There is always something."""

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """Take some bytes; at times none."""
        joined = b"".join(pieces)
        sent = self._draw.randrange(min(len(joined), 9) + 1)
        self.data += joined[:sent]
        return sent

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int]:
        """Give some bytes, at least one."""
        size = min(self._draw.randrange(1, 10), sum(b.nbytes for b in buffers), len(self.data))
        for buffer in buffers:
            part = self.data[: min(size, buffer.nbytes)]
            buffer[: len(part)] = part
            size -= len(part)
            del self.data[: len(part)]
            self.given = getattr(self, "given", 0) + len(part)
        given, self.given = self.given, 0
        return (given,)


@pytest.mark.parametrize("seed", range(20))
def test_frames_go_through_in_pieces_of_any_size(seed: int) -> None:
    draw, connection = random.Random(seed), SmallBuffers(seed)
    frame = [draw.randbytes(draw.choice([0, 1, 3, 8, 20])) for _ in range(8)]
    through: Any = connection
    send(through, frame)
    assert connection.data == b"".join(frame)
    whole = bytearray(len(connection.data))
    cuts = sorted(draw.randrange(len(whole) + 1) for _ in range(4))
    view = memoryview(whole)
    buffers = [view[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    receive_into(through, buffers, lambda last: 30.0)
    assert whole == b"".join(frame)
