"""KV connectors by name, and the base class's harmless defaults."""

from typing import Any

import pytest

from tests.v1.core.sched.scripted_connector import ScriptedConnector
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.kv_connectors import KVConnectorRegistry
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.exceptions import ConfigError

MODULE = "tests.v1.core.sched.scripted_connector"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorRegistry, "_registry", dict(KVConnectorRegistry._registry))


def config(name: str | None, **kwargs: Any) -> VllmConfig:
    transfer = KVTransferConfig(kv_connector=name, kv_role="kv_both", **kwargs)
    return VllmConfig(model_config=ModelConfig("test"), kv_transfer_config=transfer)


def test_the_example_is_registered() -> None:
    vllm_config = config("ExampleConnector", kv_connector_extra_config={"shared_storage_path": "x"})
    connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, None)
    assert isinstance(connector, ExampleConnector)
    assert connector.role is KVConnectorRole.WORKER
    assert connector._kv_transfer_config is vllm_config.kv_transfer_config
    assert connector.storage_path == "x"


def test_registration_is_lazy_and_unique() -> None:
    KVConnectorFactory.register_connector("Broken", "no.such.module", "X")
    with pytest.raises(ConfigError, match=r"no\.such\.module"):
        KVConnectorFactory.create_connector(config("Broken"), KVConnectorRole.SCHEDULER)
    with pytest.raises(ValueError, match="already registered"):
        KVConnectorFactory.register_connector("Broken", "other", "X")


def test_by_registration_and_by_module_path() -> None:
    KVConnectorFactory.register_connector("Mine", MODULE, "ScriptedConnector")
    for vllm_config in (
        config("Mine"),
        config("ScriptedConnector", kv_connector_module_path=MODULE),
    ):
        connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER)
        assert isinstance(connector, ScriptedConnector)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nobody", "use one of .*ExampleConnector"),
        (None, "names no kv_connector"),
    ],
)
def test_mistakes_are_named(name: str | None, message: str) -> None:
    vllm_config = config(name)
    with pytest.raises(ConfigError, match=message):
        KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.SCHEDULER)


def test_a_module_without_the_connector_is_named() -> None:
    with pytest.raises(ConfigError, match="has no KV connector 'Nobody'"):
        config("Nobody", kv_connector_module_path=MODULE)


def test_what_is_known() -> None:
    assert KVConnectorFactory.is_known(KVTransferConfig("ExampleConnector"))
    assert KVConnectorFactory.is_known(KVTransferConfig("X", kv_connector_module_path=MODULE))
    assert not KVConnectorFactory.is_known(KVTransferConfig("X"))
    assert not KVConnectorFactory.is_known(KVTransferConfig(None))


def test_defaults_do_nothing() -> None:
    connector: Any = ExampleConnector(config("ExampleConnector"), KVConnectorRole.SCHEDULER, None)
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector.request_finished(None, []) == (False, None)
    assert connector.take_events() == ()
    assert connector.reset_cache() is None
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.get_kv_connector_stats() is None
    assert connector.get_finished_count() is None
    assert connector.build_connector_worker_meta() is None
    for method in (
        connector.bind_gpu_block_pool,
        connector.on_new_request,
        connector.update_connector_output,
        connector.register_kv_caches,
        connector.set_host_xfer_buffer_ops,
        connector.start_load_kv,
        connector.wait_for_layer_load,
    ):
        assert method(None) is None
    assert connector.save_kv_layer("layer", None, None) is None
    assert connector.wait_for_save() is None
    assert connector.shutdown() is None


def test_metadata_lives_for_a_step() -> None:
    connector = ExampleConnector(config("ExampleConnector"), KVConnectorRole.WORKER)
    message: Any = connector.build_connector_meta(None)  # type: ignore[arg-type]
    assert not connector.has_connector_metadata()
    connector.bind_connector_metadata(message)
    assert connector._get_connector_metadata() is message
    connector.clear_connector_metadata()
    with pytest.raises(AssertionError):
        connector._get_connector_metadata()


def test_hybrid_support_is_a_marker() -> None:
    class Hybrid(ExampleConnector, SupportsHMA):
        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
            return False, None

    assert supports_hma(Hybrid)
    assert supports_hma(Hybrid(config("x"), KVConnectorRole.SCHEDULER))
    assert not supports_hma(ExampleConnector)
    assert not supports_hma(ExampleConnector(config("x"), KVConnectorRole.SCHEDULER))
    assert issubclass(Hybrid, KVConnectorBase_V1)
