import os
import threading

import pytest
import zmq

from vllm.exceptions import EngineError
from vllm.v1.engine import channel as channel_module
from vllm.v1.engine.channel import Channel, Endpoints


@pytest.fixture(params=[False, True], ids=["ipc", "tcp"])
def pair(request):
    near, endpoints = Channel.bind(use_tcp=request.param)
    far = Channel.connect(endpoints)
    yield near, far, endpoints
    far.close()
    near.close()


def test_messages_go_both_ways(pair):
    near, far, _ = pair
    assert far.send(b"hello")
    assert near.receive(5) == b"hello"
    assert near.wait_connected(5)
    assert near.send(b"back")
    assert far.receive(5) == b"back"
    assert near.receive(0.01) is None


def test_many_threads_may_send(pair):
    near, far, _ = pair
    threads = [
        threading.Thread(target=lambda i=i: [far.send(b"%d" % i) for _ in range(50)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    received = [near.receive(5) for _ in range(200)]
    for thread in threads:
        thread.join()
    assert sorted(received) == sorted(b"%d" % i for i in range(4) for _ in range(50))


def test_sending_to_nobody_or_after_close_does_not_block(pair):
    near, far, _ = pair
    near.close()
    assert not near.send(b"x")
    near.close_sender()
    lonely, _ = Channel.bind()
    assert not lonely.send(b"x")
    assert not lonely.wait_connected(0.01)
    lonely.close()
    assert far.receive(0.01) is None


def test_tcp_lets_no_stranger_in():
    near, endpoints = Channel.bind(use_tcp=True)
    assert endpoints.to_core.startswith("tcp://127.0.0.1:")
    stranger = Channel.connect(Endpoints(endpoints.to_core, endpoints.from_core))
    wrong_key = Channel.connect(
        Endpoints(endpoints.to_core, endpoints.from_core, zmq.curve_keypair()[0])
    )
    for intruder in (stranger, wrong_key):
        intruder.send(b"evil")
    assert near.receive(0.3) is None
    for channel in (stranger, wrong_key):
        channel._send_socket.setsockopt(zmq.LINGER, 0)
        channel.close()
    near.close()


def test_a_path_that_is_too_long_is_left_for_a_short_one(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    near, endpoints = Channel.bind()
    assert endpoints.to_core.startswith("ipc:///tmp/")
    near.close()
    assert list(deep.iterdir()) == []
    assert not os.path.exists(os.path.dirname(endpoints.to_core.removeprefix("ipc://")))


def test_tcp_without_encryption_is_refused(monkeypatch):
    monkeypatch.setattr(channel_module.zmq, "has", lambda feature: False)
    with pytest.raises(EngineError, match="TMPDIR"):
        Channel.bind()
