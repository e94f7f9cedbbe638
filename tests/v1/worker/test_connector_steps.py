"""The connector's calls in a step, and what its report carries."""

from typing import Any

import pytest
import torch

from tests.v1.worker.fakes import kv_cache_config, make_runner
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.connector_steps import ConnectorSteps, make_connector_steps


class Message(KVConnectorMetadata):
    """Load block 5 with ones."""


class RecordingConnector(KVConnectorBase_V1):
    """Writes down what it is told and fills block 5."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        raise AssertionError("scheduler's side")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        raise AssertionError("scheduler's side")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        raise AssertionError("scheduler's side")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.has_connector_metadata()
        self.calls.append("load")
        for layer in self.caches.values():
            layer[5] = 1

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.calls.append(f"wait {layer_name}")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        assert kv_layer is self.caches[layer_name]
        self.calls.append(f"save {layer_name}")

    def wait_for_save(self) -> None:
        self.calls.append("saved")

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return set(finished_req_ids), {"incoming"}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {9}

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def make_steps(*, acts_by_layer: bool = True) -> tuple[ConnectorSteps, RecordingConnector]:
    _, _, pool = make_runner(num_blocks=12)
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="Recording"))
    connector = RecordingConnector(config, KVConnectorRole.WORKER, kv_cache_config(12))
    connector.acts_by_layer = acts_by_layer
    return ConnectorSteps(connector, pool.layers), connector


def test_a_step_loads_then_saves_and_reports() -> None:
    steps, connector = make_steps()
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"gone"}
    output.kv_connector_metadata = Message()
    steps.load(output)
    assert connector.calls == ["load", "wait a", "wait b", "wait w"]
    assert connector.caches["a"][5].eq(1).all()
    report = steps.save(output)
    assert connector.calls[4:] == ["save a", "save b", "save w", "saved"]
    assert report is not None
    assert report.finished_sending == {"gone"}
    assert report.finished_recving == {"incoming"}
    assert report.invalid_block_ids == {9}
    assert not connector.has_connector_metadata()


def test_a_connector_of_whole_prefixes_is_not_called_for_each_layer() -> None:
    steps, connector = make_steps(acts_by_layer=False)
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = Message()
    steps.load(output)
    assert steps.save(output) is not None
    assert connector.calls == ["load", "saved"]


def test_a_step_without_a_message_does_nothing() -> None:
    steps, connector = make_steps()
    output = SchedulerOutput.make_empty()
    steps.load(output)
    assert steps.save(output) is None
    assert connector.calls == []
    steps.shutdown()
    assert connector.calls == ["shutdown"]


def test_the_configured_connector_is_built() -> None:
    _, _, pool = make_runner(num_blocks=12)
    cache = kv_cache_config(12)
    assert make_connector_steps(VllmConfig(), cache, pool.layers) is None
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector"))
    assert make_connector_steps(config, cache, pool.layers) is not None
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="Nope"))
    with pytest.raises(ValueError, match="Nope"):
        make_connector_steps(config, cache, pool.layers)
