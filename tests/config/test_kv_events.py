"""What ``--kv-events-config`` takes and refuses."""

from pathlib import Path
from typing import Any

import pytest

from vllm.config.kv_events import KVEventsConfig
from vllm.exceptions import ConfigError
from vllm.v1.engine.engine_args import EngineArgs


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"enable": True}, "unknown keys 'enable': use enable_kv_cache_events, publisher"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events=1 must be true or false"),
        ({"publisher": "kafka"}, "'kafka' is unknown: use zmq or null"),
        ({"publisher": 5}, "publisher=5 must be a string"),
        ({"buffer_steps": -1}, "buffer_steps=-1 must be at least 0"),
        ({"buffer_steps": True}, "buffer_steps=True must be a whole number"),
        ({"hwm": 1.5}, "hwm=1.5 must be a whole number"),
        ({"max_queue_size": "9"}, "max_queue_size='9' must be a whole number"),
        ({"topic": None}, "topic=None must be a string"),
        ({"endpoint": None}, "endpoint=None must be a string"),
        ({"endpoint": ""}, "is no ZMQ address"),
        ({"endpoint": "localhost:5557"}, "is no ZMQ address"),
        ({"endpoint": "udp://host:1"}, "is no ZMQ address"),
        ({"endpoint": "inproc://"}, "is no ZMQ address"),
        ({"endpoint": "tcp://*"}, "lacks a host or a port"),
        ({"endpoint": "tcp://:5557"}, "lacks a host or a port"),
        ({"endpoint": "tcp://host:"}, "has port ''"),
        ({"endpoint": "tcp://host:http"}, "has port 'http'"),
        ({"endpoint": "tcp://host:0"}, "has port '0'"),
        ({"endpoint": "tcp://host:65536"}, "has port '65536'"),
        ({"endpoint": "tcp://::1:5557"}, "has host '::1'"),
        ({"endpoint": "tcp://a b:5557"}, "has host 'a b'"),
        ({"endpoint": "tcp://host/path:5557"}, "has host 'host/path'"),
        ({"endpoint": "ipc:///no/such/folder/socket"}, "'/no/such/folder', no folder"),
        ({"endpoint": "ipc:///tmp/" + "x" * 120}, "more than 107 bytes"),
        ({"replay_endpoint": "tcp://*:x"}, "replay_endpoint='tcp://.:x' has port 'x'"),
        ({"replay_endpoint": "tcp://*:5557"}, "addresses of their own"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(kv_events_config=raw).create_vllm_config()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557",
        "tcp://router.local:1",
        "tcp://[::1]:65535",
        "tcp://[fe80::1%eth0]:9",
        "ipc://@x",
    ],
)
def test_taken(endpoint: str) -> None:
    config = KVEventsConfig.from_dict({"enable_kv_cache_events": True, "endpoint": endpoint})
    assert (config.publisher, config.endpoint, config.publishes) == ("zmq", endpoint, True)


def test_ipc(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    assert KVEventsConfig.from_dict({"endpoint": endpoint}).endpoint == endpoint


def test_engine_args_hand_it_on(caplog: pytest.LogCaptureFixture) -> None:
    raw = {"enable_kv_cache_events": True, "topic": "kv", "buffer_steps": 5}
    config = EngineArgs(kv_events_config=raw).create_vllm_config()
    assert config.kv_events_config == KVEventsConfig(True, topic="kv", buffer_steps=5)
    assert EngineArgs().create_vllm_config().kv_events_config is None
    assert "KV events" not in caplog.text


@pytest.mark.parametrize(
    ("raw", "args", "message"),
    [
        ({"publisher": "zmq"}, {}, "set enable_kv_cache_events to true"),
        ({"enable_kv_cache_events": True, "publisher": "null"}, {}, "not published"),
        ({"enable_kv_cache_events": True}, {"enable_prefix_caching": False}, "there will be none"),
    ],
)
def test_a_config_that_publishes_nothing_is_told(
    raw: dict[str, Any], args: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    EngineArgs(kv_events_config=raw, **args).create_vllm_config()
    assert message in caplog.text
