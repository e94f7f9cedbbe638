"""Several KV connectors as one: the pool is asked first, then each of them in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from vllm.config.kv_transfer import KVTransferConfig, child_configs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hooks import JoinedHooks
from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class MultiMetadata(KVConnectorMetadata):
    """One step's message of each connector."""

    parts: list[KVConnectorMetadata] = field(default_factory=list)


@dataclass
class MultiReport(KVConnectorWorkerMetadata):
    """What a worker tells each connector; None: nothing."""

    parts: list[KVConnectorWorkerMetadata | None] = field(default_factory=list)

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiReport:
        assert isinstance(other, MultiReport)
        merged: list[KVConnectorWorkerMetadata | None] = []
        for left, right in zip(self.parts, other.parts, strict=True):
            both = left is not None and right is not None
            merged.append(left.aggregate(right) if both else left or right)  # type: ignore[union-attr,arg-type]
        return MultiReport(merged)


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads each request's prefix through the connector that brings it furthest.

    Of equal ones the first is taken: list a tier before a peer. What is given to others, and what
    is kept, is each connector's own. Two connectors never load for one request at a time.

    Owns: the connectors, and which of them loads which request.

    Raises:
        ConfigError: The list is empty, or a connector's settings are wrong.
    """

    # A pair in which one cannot is refused by ``check_before_load``.
    moves_checkpoints = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._parts = [
            KVConnectorFactory.create_connector(config, role, kv_cache_config)
            for config in _split(vllm_config)
        ]
        self.acts_by_layer = any(part.acts_by_layer for part in self._parts)
        self._offers: dict[str, int] = {}
        self._loads: dict[str, int] = {}

    @classmethod
    def check_before_load(cls, vllm_config: VllmConfig) -> None:
        """Let each connector refuse what cannot work.

        Raises:
            ConfigError: One does, or one cannot move what resuming in this model needs.
        """
        for config in _split(vllm_config):
            config.__post_init__()
            KVConnectorFactory.check_before_load(config)

    # ---- the scheduler's side ----------------------------------------------------------------

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Hand the pool to all."""
        for part in self._parts:
            part.bind_gpu_block_pool(block_pool)

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Hand the manager to all."""
        for part in self._parts:
            part.bind_kv_cache_manager(manager)
        hooks = [part.hooks for part in self._parts]
        self.hooks = JoinedHooks(hooks, self._loads, self._split_report)

    def on_new_request(self, request: Request) -> None:
        """Tell all; the last ones first: a peer may refuse the request, a tier never does.

        Raises:
            UserInputError: One of them refuses the request.
        """
        for part in reversed(self._parts):
            part.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what the connector can load that brings the request furthest."""
        self._offers.pop(request.request_id, None)
        best, is_async = 0, False
        for index, part in enumerate(self._parts):
            found, loads_beside = part.get_num_new_matched_tokens(request, num_computed_tokens)
            if found is None:
                return None, False
            if found > best:
                best, is_async = found, loads_beside
                self._offers[request.request_id] = index
        return best, is_async

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Let the one load that was chosen, and tell the others that they need not."""
        chosen = self._offers.pop(request.request_id, None) if num_external_tokens else None
        if chosen is not None:
            self._loads[request.request_id] = chosen
        for index, part in enumerate(self._parts):
            own = num_external_tokens if index == chosen else 0
            part.update_state_after_alloc(request, blocks, own)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return all messages of a step."""
        self._offers.clear()
        return MultiMetadata([part.build_connector_meta(scheduler_output) for part in self._parts])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell each what its workers report."""
        for part, report in zip(
            self._parts, self._split_report(connector_output.kv_connector_worker_meta), strict=True
        ):
            own = copy.copy(connector_output)
            own.kv_connector_worker_meta = report
            part.update_connector_output(own)
        for request_id in (
            *(connector_output.finished_recving or ()),
            *connector_output.failed_recving,
        ):
            self._loads.pop(request_id, None)

    def _split_report(self, report: Any) -> list[KVConnectorWorkerMetadata | None]:
        return report.parts if isinstance(report, MultiReport) else [None] * len(self._parts)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell all of a request's end; the client gets what one of them has to say."""
        keeps, params = False, None
        for part in self._parts:
            assert isinstance(part, SupportsHMA)
            kept, told = part.request_finished_all_groups(request, block_ids)
            keeps, params = keeps or kept, params or told
        return keeps, params

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Drain the events of all."""
        return [event for part in self._parts for event in part.take_events()]

    def reset_cache(self) -> bool | None:
        """Forget what any of them keeps."""
        done = [part.reset_cache() for part in self._parts]
        return all(answer is not False for answer in done)

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Hand it to all; a wait is safe if all of them call it."""
        called = [part.bind_wake(wake) for part in self._parts]
        return all(called)

    # ---- the worker's side -------------------------------------------------------------------

    def bind_rank(self, rank: int) -> None:
        """Tell all the worker's index."""
        super().bind_rank(rank)
        for part in self._parts:
            part.bind_rank(rank)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Hand each its message."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, MultiMetadata)
        for part, metadata in zip(self._parts, connector_metadata.parts, strict=True):
            part.bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        """Forget all messages."""
        super().clear_connector_metadata()
        for part in self._parts:
            part.clear_connector_metadata()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Hand the KV tensors to all."""
        for part in self._parts:
            part.register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Callable[..., Any]) -> None:
        """Hand the platform's copy to all."""
        for part in self._parts:
            part.set_host_xfer_buffer_ops(copy_operation)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin all loads of a step."""
        for part in self._parts:
            part.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for all."""
        for part in self._parts:
            part.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let all save a layer."""
        for part in self._parts:
            part.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """Wait for all."""
        for part in self._parts:
            part.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return what any of them sent and received."""
        sent: set[str] = set()
        received: set[str] = set()
        for part in self._parts:
            gone, came = part.get_finished(finished_req_ids)
            sent |= gone or set()
            received |= came or set()
        return sent or None, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that any of them could not load."""
        return set().union(*(part.get_block_ids_with_load_errors() for part in self._parts))

    def get_failed_loads(self) -> set[str]:
        """Return the requests that any of them failed."""
        return set().union(*(part.get_failed_loads() for part in self._parts))

    def build_connector_worker_meta(self) -> MultiReport:
        """Return what the worker tells each of them."""
        return MultiReport([part.build_connector_worker_meta() for part in self._parts])

    def shutdown(self) -> None:
        """Release what all of them hold."""
        for part in self._parts:
            part.shutdown()


def _split(config: VllmConfig) -> list[VllmConfig]:
    """Return the configuration as each connector sees it; all share what they may set in it.

    Raises:
        ConfigError: There is no list, or an entry is malformed.
    """
    assert config.kv_transfer_config is not None
    children: list[KVTransferConfig] = child_configs(config.kv_transfer_config)
    if len(children) < 2:
        raise ConfigError(
            "MultiConnector joins connectors: list at least two in "
            'kv_connector_extra_config, {"connectors": [{"kv_connector": ...}, ...]}.'
        )
    split = []
    for child in children:
        own = copy.copy(config)
        own.kv_transfer_config = child
        split.append(own)
    return split
