"""The encoder-cache example connector and its registry."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from vllm.config import ECTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    MMMeta,
)
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.exceptions import ConfigError


def connector(path: Path, role: str) -> ECExampleConnector:
    transfer = ECTransferConfig("ECExampleConnector", role, {"shared_storage_path": str(path)})
    config = VllmConfig(model_config=ModelConfig("test"), ec_transfer_config=transfer)
    made = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    assert isinstance(made, ECExampleConnector)
    return made


def request(identifier: str) -> Any:
    return Mock(
        mm_features=[Mock(identifier=identifier)], get_num_encoder_embeds=Mock(return_value=9)
    )


def test_roles(tmp_path: Path) -> None:
    both = connector(tmp_path, "ec_both")
    assert (both.is_producer, both.is_consumer) == (True, True)
    producer = connector(tmp_path, "ec_producer")
    assert (producer.is_producer, producer.is_consumer) == (True, False)
    assert producer.role is ECConnectorRole.SCHEDULER
    assert producer.ensure_cache_available(request("a"), 0) is True
    assert producer.request_finished(request("a")) == (False, None)


def test_a_consumer_loads_what_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "encoder_cache.safetensors").touch()
    consumer = connector(tmp_path, "ec_consumer")
    assert consumer.has_cache_item("a")
    assert not consumer.has_cache_item("b")
    consumer.update_state_after_alloc(request("a"), 0)
    consumer.update_state_after_alloc(request("b"), 0)
    output: Any = None
    meta: Any = consumer.build_connector_meta(output)
    assert meta.mm_datas == [MMMeta("a", 9)]
    assert meta.mm_datas[0].mm_hash == "a"
    assert meta.mm_datas[0].num_token == 9
    again: Any = consumer.build_connector_meta(output)
    assert again.mm_datas == []


def test_a_replaced_lookup_is_used(tmp_path: Path) -> None:
    consumer = connector(tmp_path, "ec_consumer")
    consumer.has_cache_item = Mock(return_value=True)  # type: ignore[method-assign]
    consumer.update_state_after_alloc(request("z"), 0)
    meta: Any = consumer.build_connector_meta(Mock())
    assert [data.mm_hash for data in meta.mm_datas] == ["z"]


def test_a_producer_loads_nothing(tmp_path: Path) -> None:
    producer = connector(tmp_path, "ec_producer")
    producer.has_cache_item = Mock(return_value=True)  # type: ignore[method-assign]
    producer.update_state_after_alloc(request("a"), 0)
    meta: Any = producer.build_connector_meta(Mock())
    assert meta.mm_datas == []


def test_registry_mistakes() -> None:
    with pytest.raises(ValueError, match="already registered"):
        ECConnectorFactory.register_connector("ECExampleConnector", "x", "y")
    transfer = ECTransferConfig("Nobody", "ec_both")
    config = VllmConfig(model_config=ModelConfig("test"), ec_transfer_config=transfer)
    with pytest.raises(ConfigError, match=r"Nobody.*ECExampleConnector"):
        ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
