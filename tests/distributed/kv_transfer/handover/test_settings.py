"""The connector's own settings."""

from typing import Any

import pytest

from vllm.config import CacheConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.handover.connector import TcpConnector
from vllm.distributed.kv_transfer.handover.settings import HandoverSettings, read_settings
from vllm.distributed.kv_transfer.handover.sockets import listen
from vllm.exceptions import ConfigError


def make_config(role: str = "kv_both", port: int = 14579, **extra: Any) -> VllmConfig:
    raw = {"kv_connector": "TcpConnector", "kv_role": role, "kv_port": port}
    transfer = KVTransferConfig.from_dict({**raw, "kv_connector_extra_config": extra})
    return VllmConfig(kv_transfer_config=transfer)


def read(**extra: Any) -> HandoverSettings:
    return read_settings(make_config(**extra))


def test_settings() -> None:
    settings = read(lease_timeout_s=7, peers=["10.0.0.1:80", "prefill:14579"])
    assert settings.lease_timeout_s == 7.0
    assert settings.peers == (("10.0.0.1", 80), ("prefill", 14579))
    assert (settings.can_give, settings.can_take) == (True, True)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"lease_timeout": 7}, "'lease_timeout'.*lease_timeout_s"),
        ({"load_timeout_s": 0}, "load_timeout_s=0"),
        ({"load_timeout_s": "5"}, "load_timeout_s='5'"),
        ({"quiet_timeout_s": True}, "quiet_timeout_s=True"),
        ({"peers": ["10.0.0.1"]}, r"10\.0\.0\.1.*host:port"),
        ({"peers": ["a:99999"]}, "99999"),
        ({"peers": "10.0.0.1:80"}, r"peers='10\.0\.0\.1:80' is no list"),
        ({"peers": 5}, "peers=5 is no list"),
        ({"peers": [None]}, "None"),
    ],
)
def test_wrong_settings_are_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**extra)


def test_replicas_and_their_workers_have_ports_of_their_own() -> None:
    config = make_config()
    config.parallel_config = ParallelConfig(data_parallel_index=3, data_parallel_size=4)
    assert read_settings(config).port == 14582
    config.parallel_config = ParallelConfig(
        data_parallel_index=1, data_parallel_size=2, tensor_parallel_size=4
    )
    # The first core's ranks are on 14579 to 14582.
    assert read_settings(config).port == 14583


@pytest.mark.parametrize(
    ("parallel", "transfer", "named"),
    [
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size=1, not with 2"),
        ({"tensor_parallel_size": 2}, {"port": 65535}, "kv_port=65535 .* 2 workers"),
        (
            {"distributed_executor_backend": "ray"},
            {"role": "kv_producer"},
            "--kv-transfer-config .*--distributed-executor-backend ray",
        ),
        (
            {"data_parallel_backend": "ray", "data_parallel_size": 2},
            {},
            "--kv-transfer-config .*--data-parallel-backend ray",
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    parallel: dict[str, Any], transfer: dict[str, Any], named: str
) -> None:
    config = make_config(**transfer)
    config.parallel_config = ParallelConfig(**parallel)
    with pytest.raises(ConfigError, match=named):
        read_settings(config)


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::"])
def test_an_address_that_means_any_cannot_be_told_to_others(address: str) -> None:
    config = make_config("kv_producer")
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_ip = address
    with pytest.raises(ConfigError, match=rf"kv_ip='{address}'.*set an address"):
        read_settings(config)


def test_a_producer_needs_the_prefix_cache() -> None:
    config = make_config("kv_producer")
    config.cache_config = CacheConfig(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="prefix caching is off"):
        read_settings(config)
    taking = make_config("kv_consumer")
    taking.cache_config = CacheConfig(enable_prefix_caching=False)
    assert read_settings(taking).can_take


def test_a_taken_port_is_told_before_weights_load() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=str(port)):
            TcpConnector.check_before_load(make_config("kv_producer", port))
        config = make_config("kv_producer", port - 1)
        config.parallel_config = ParallelConfig(tensor_parallel_size=2)
        with pytest.raises(ConfigError, match=f"{port}|{port - 1}"):
            TcpConnector.check_before_load(config)
        # Whoever only takes listens nowhere.
        TcpConnector.check_before_load(make_config("kv_consumer", port))
