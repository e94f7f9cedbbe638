"""Sockets: what cannot be listened on or connected to, and strangers' frames."""

import socket

import pytest

from vllm.distributed.kv_transfer.handover.frames import FrameError, Head, Kind, control_frame
from vllm.distributed.kv_transfer.handover.sockets import (
    PeerClosedError,
    close,
    connect,
    listen,
    receive_control,
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
