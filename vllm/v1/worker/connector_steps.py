"""The worker's side of a KV connector, driven once per step."""

from collections.abc import Callable, Mapping

import torch

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput


class ConnectorSteps:
    """Loads before a step's forward pass and saves after it, all layers at a time.

    The model takes its caches as plain tensors and knows no connector, so a step waits for its
    loads as a whole instead of layer by layer.

    Args:
        connector: The worker's side.
        layers: Every layer's view of the pool.

    Owns: the connector.
    """

    def __init__(self, connector: KVConnectorBase_V1, layers: Mapping[str, torch.Tensor]) -> None:
        self._connector = connector
        # One that moves whole prefixes has nothing to do for each of hundreds of caches a step.
        self._saved = layers if connector.acts_by_layer else {}
        self._all_layers = layers
        connector.register_kv_caches(dict(layers))

    def load(self, output: SchedulerOutput) -> None:
        """Take the step's message and bring its blocks in."""
        if output.kv_connector_metadata is None:
            return
        self._connector.bind_connector_metadata(output.kv_connector_metadata)
        self._connector.start_load_kv(self._all_layers)
        for name in self._saved:
            self._connector.wait_for_layer_load(name)

    def save(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Give the step's blocks away and report; None for a step without a message."""
        connector = self._connector
        if not connector.has_connector_metadata():
            return None
        for name, layer in self._saved.items():
            connector.save_kv_layer(name, layer, None)
        connector.wait_for_save()
        sent, received = connector.get_finished(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            expected_finished_count=connector.get_finished_count() or 0,
            failed_recving=connector.get_failed_loads(),
        )
        connector.clear_connector_metadata()
        return report

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Hand on what rouses the engine core; returns whether the connector calls it."""
        return self._connector.bind_wake(wake)

    def shutdown(self) -> None:
        """Release what the connector holds."""
        self._connector.shutdown()


def make_connector_steps(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layers: Mapping[str, torch.Tensor],
    rank: int = 0,
) -> ConnectorSteps | None:
    """Build the configured connector's worker side; None without one.

    Args:
        vllm_config: All configuration.
        kv_cache_config: Groups and size of this worker's KV cache.
        layers: Every layer's view of the pool.
        rank: The worker's index among those that share its model.

    Raises:
        ConfigError: The connector is unknown.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    connector = KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.WORKER, kv_cache_config
    )
    connector.bind_rank(rank)
    return ConnectorSteps(connector, layers)
