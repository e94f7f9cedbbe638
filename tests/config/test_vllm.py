"""What follows from several configurations together."""

import pytest

from vllm.config import (
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.exceptions import ConfigError


class OneGroupConnector(KVConnectorBase_V1):
    """Handles a single KV cache group."""


class AllGroupsConnector(KVConnectorBase_V1, SupportsHMA):
    """Handles every KV cache group."""


def _is_hybrid_off(connector: str | None, given: bool | None = None) -> bool | None:
    config = VllmConfig(
        scheduler_config=SchedulerConfig(disable_hybrid_kv_cache_manager=given),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_module_path=__name__
        ),
    )
    return config.scheduler_config.disable_hybrid_kv_cache_manager


@pytest.mark.parametrize(
    ("connector", "is_off"),
    [(None, False), ("OneGroupConnector", True), ("AllGroupsConnector", False)],
)
def test_the_connector_decides_about_the_hybrid_manager(
    connector: str | None, is_off: bool
) -> None:
    assert _is_hybrid_off(connector) is is_off


@pytest.mark.parametrize("given", [True, False])
def test_who_chooses_is_not_overruled(given: bool) -> None:
    assert _is_hybrid_off("OneGroupConnector", given) is given
    assert _is_hybrid_off("AllGroupsConnector", given) is given


def test_events_leave_the_hybrid_manager_on() -> None:
    config = VllmConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_an_unknown_connector_decides_nothing() -> None:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="nosuch"))
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_the_given_objects_are_kept() -> None:
    scheduler_config = SchedulerConfig()
    assert VllmConfig(scheduler_config=scheduler_config).scheduler_config is scheduler_config


V4 = ModelConfig("v4", hf_config={"model_type": "deepseek_v4"})


@pytest.mark.parametrize("connector", ["OneGroupConnector", "AllGroupsConnector", "nosuch"])
def test_a_connector_does_not_go_with_unit_hits(connector: str) -> None:
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    with pytest.raises(ConfigError, match=f"{connector}.*leave kv_transfer_config out"):
        VllmConfig(model_config=V4, kv_transfer_config=transfer)


def test_no_connector_goes_with_unit_hits() -> None:
    assert VllmConfig(model_config=V4, kv_transfer_config=KVTransferConfig()).model_config is V4
