"""Rows that are written into the puller's buffer instead of being sent."""

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

from tests.distributed.kv_transfer.handover.builders import ME, PULL_TIMEOUTS, Engines
from tests.distributed.kv_transfer.handover.test_pulling import answers, hand_in
from tests.distributed.kv_transfer.handover.test_settings import make_config
from vllm.config.kv_connectors import KVConnectorRegistry
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.handover.frames import Buffer, FrameError, Head, Kind
from vllm.distributed.kv_transfer.handover.pulling import Load
from vllm.distributed.kv_transfer.handover.serving import Frame, Serving
from vllm.distributed.kv_transfer.handover.settings import read_settings
from vllm.exceptions import ConfigError


class FakePlane:
    """Both sides' memory: addresses begin at 1,000."""

    session, address = "there", 1000

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory = bytearray(capacity)
        self.num_writes = 0

    def write(self, session: str, address: int, pieces: Sequence[Buffer]) -> None:
        assert session == self.session
        data = b"".join(bytes(piece) for piece in pieces)
        start = address - self.address
        assert start >= 0
        assert start + len(data) <= self.capacity, "outside of the buffer"
        self.memory[start : start + len(data)] = data
        self.num_writes += 1

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.memory[offset : offset + length])


def make_load(engines: Engines, plane: FakePlane) -> Load:
    plain, blocks = engines.load("a", num_tokens=256)
    return Load(
        *(ME, plain.remote, blocks, plain._regions, engines.taking, engines._next),
        *(20.0, 0.0, PULL_TIMEOUTS, plane),
    )


def serve(engines: Engines, plane: FakePlane) -> Serving:
    serving = engines.serving()
    serving._writer = plane
    return serving


@pytest.mark.parametrize("capacity", [64, 100, 4096])
def test_rows_come_by_the_buffer(capacity: int) -> None:
    engines, plane = Engines(), FakePlane(capacity)
    engines.offer("a", prompt=3, num_tokens=256)
    load = make_load(engines, plane)
    serving = serve(engines, plane)
    frames = list(load.connected(is_greeted=False))
    kinds = []
    while frames:
        came = answers(serving, frames)
        kinds += [Head.unpack(frame[0]).kind for frame in came]
        frames = [said for frame in came for said in hand_in(load, frame)]
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(load._blocks, prompt=3)
    assert Kind.ROWS not in kinds
    # A small buffer takes several pulls.
    assert (kinds.count(Kind.END) > 1) == (capacity < 4096)


def pulled(load: Load, serving: Serving) -> list[Frame]:
    (welcome,) = answers(serving, list(load.connected(is_greeted=False)))
    return answers(serving, hand_in(load, welcome))


def test_a_late_write_is_not_believed() -> None:
    engines, plane = Engines(), FakePlane(4096)
    engines.offer("a", prompt=3, num_tokens=256)
    load = make_load(engines, plane)
    serving = serve(engines, plane)
    frames = pulled(load, serving)
    # What another load left there since.
    plane.memory[:] = bytes(4096)
    asked = [said for frame in frames for said in hand_in(load, frame)]
    assert load.outcome is None
    assert load.num_dropped == len(frames) - 1
    for frame in answers(serving, asked):
        hand_in(load, frame)
    assert load.outcome is not None
    assert load.outcome.succeeded
    assert engines.has_rows(load._blocks, prompt=3)


def test_a_buffer_that_is_too_small_is_told() -> None:
    engines, plane = Engines(), FakePlane(8)
    engines.offer("a", prompt=3, num_tokens=256)
    load = make_load(engines, plane)
    (welcome,) = answers(serve(engines, plane), list(load.connected(is_greeted=False)))
    hand_in(load, welcome)
    assert load.outcome is not None
    assert "buffer's 8" in load.outcome.reason


def test_a_holder_without_the_transport_does_not_serve() -> None:
    engines, plane = Engines(), FakePlane(4096)
    engines.offer("a", prompt=3, num_tokens=256)
    load = make_load(engines, plane)
    with pytest.raises(FrameError, match="transport"):
        pulled(load, engines.serving())


def test_mooncake_without_its_package_is_told_at_start() -> None:
    if find_spec("mooncake") is not None:
        pytest.skip("the package is installed")
    config = make_config()
    config.kv_transfer_config = KVTransferConfig("MooncakeConnector", "kv_consumer")
    connector = KVConnectorRegistry.load_class(config.kv_transfer_config)
    with pytest.raises(ConfigError, match="mooncake-transfer-engine"):
        connector.check_before_load(config)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"protocol": "ib"}, "protocol='ib'"),
        ({"device_name": 3}, "device_name=3"),
        ({"buffer_bytes": 5}, "buffer_bytes=5"),
    ],
)
def test_wrong_settings_of_mooncake_are_named(extra: dict[str, object], named: str) -> None:
    config = make_config()
    config.kv_transfer_config = KVTransferConfig("MooncakeConnector", "kv_consumer", extra)
    with pytest.raises(ConfigError, match=named):
        read_settings(config)
    # Other connectors do not know them.
    config.kv_transfer_config = KVTransferConfig("TcpConnector", "kv_consumer", extra)
    with pytest.raises(ConfigError, match="unknown keys"):
        read_settings(config)
