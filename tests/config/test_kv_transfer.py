"""``--kv-transfer-config``: what is wrong is told by name, before anything loads."""

from typing import Any

import pytest

from vllm.config import KVTransferConfig
from vllm.exceptions import ConfigError

TCP = {"kv_connector": "TcpConnector", "kv_role": "kv_producer"}


def test_what_is_left_out_has_defaults() -> None:
    config = KVTransferConfig.from_dict(TCP)
    assert (config.kv_ip, config.kv_port) == ("127.0.0.1", 14579)
    assert config.kv_load_failure_policy == "recompute"
    other = KVTransferConfig.from_dict(TCP)
    # Names nobody gave are each one's own, and so is every run.
    assert config.engine_id != other.engine_id
    assert config.instance_id != other.instance_id
    assert KVTransferConfig.from_dict({**TCP, "engine_id": "p0"}).engine_id == "p0"


@pytest.mark.parametrize(
    ("role", "gives", "takes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles(role: str, gives: bool, takes: bool) -> None:
    config = KVTransferConfig.from_dict({**TCP, "kv_role": role})
    assert (config.is_kv_producer, config.is_kv_consumer) == (gives, takes)


def test_fields_of_others_are_passed_over() -> None:
    config = KVTransferConfig.from_dict({**TCP, "kv_rank": 0, "kv_parallel_size": 2})
    assert {name: getattr(config, name) for name in TCP} == TCP


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_role": "producer"}, "kv_role='producer'.*kv_producer"),
        ({"kv_port": "14579"}, "kv_port='14579'"),
        ({"kv_port": True}, "kv_port=True"),
        ({"kv_port": 70_000}, "kv_port=70000"),
        ({"kv_load_failure_policy": "retry"}, "retry.*recompute"),
        ({"kv_connector_extra_config": []}, "kv_connector_extra_config"),
        ({"kv_prot": 1}, "kv_prot.*kv_port"),
        ({"engine_id": ""}, "engine_id=''"),
        ({"engine_id": "a\nb"}, "engine_id=.*printable"),
        ({"engine_id": "x" * 201}, "200 printable"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        KVTransferConfig.from_dict({**TCP, **change})


@pytest.mark.parametrize("missing", list(TCP))
def test_connector_and_role_must_be_there(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        KVTransferConfig.from_dict({k: v for k, v in TCP.items() if k != missing})
