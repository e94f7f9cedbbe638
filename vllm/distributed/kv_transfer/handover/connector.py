"""The connector that hands prefixes over: the decoding engine pulls, the prefilling one holds.

scheduler   a request that takes: its offered tokens enter the plan behind the local hit
            a request that gives: its prefix is held when it ends, and its client told where
worker      loads run in threads beside the steps; leases are read by other engines
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from vllm.distributed.kv_transfer.handover.direct import DataPlane
from vllm.distributed.kv_transfer.handover.orders import HandoverOrders, HandoverReport
from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.handover.requests import Giving, Taking, read_transfer_request
from vllm.distributed.kv_transfer.handover.serving import RowMemory
from vllm.distributed.kv_transfer.handover.settings import read_settings
from vllm.distributed.kv_transfer.handover.sockets import listen
from vllm.distributed.kv_transfer.handover.worker import HandoverWorker
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.beside_steps import BesideStepsConnector
from vllm.distributed.kv_transfer.kv_connector.v1.hooks import ConnectorHooks
from vllm.v1.core.pool.exports import PrefixBlocks

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class TcpConnector(BesideStepsConnector, ConnectorHooks):
    """Hands prefixes over by TCP.

    Owns: on the scheduler's side, the requests that give or take, and the next step's orders; on
    the worker's, its transfers.

    Raises:
        ConfigError: The settings are wrong.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(vllm_config)
        self.hooks = self
        self.drain_timeout_s = self._settings.drain_timeout_s
        self._orders = HandoverOrders()
        self._taking: Taking | None = None
        self._giving: Giving | None = None
        self._worker: HandoverWorker | None = None
        self._num_returning = 0

    @classmethod
    def check_before_load(cls, vllm_config: VllmConfig) -> None:
        """Check the settings, and that each worker's port is free.

        Raises:
            ConfigError: One is wrong, or a port is taken.
        """
        settings = read_settings(vllm_config)
        if settings.can_give:
            for rank in range(vllm_config.parallel_config.world_size):
                listen(settings.host, settings.port + rank).close()

    # ---- the scheduler's side ----------------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take the manager that holds, and makes room for, prefixes."""
        self._taking = Taking(manager, self._unit_of(manager.kv_cache_config))
        num_workers = self._vllm_config.parallel_config.world_size
        self._giving = Giving(manager, num_workers, self._describe)

    def _describe(self, lease: str, blocks: PrefixBlocks) -> RemotePrefix:
        transfer, settings = self._kv_transfer_config, self._settings
        return RemotePrefix(
            engine_id=transfer.engine_id or "",
            instance=transfer.instance_id,
            host=settings.host,
            port=settings.port,
            lease=lease,
            num_tokens=blocks.num_tokens,
            digest="",
            next_token=blocks.next_token,
        )

    @property
    def _takes(self) -> Taking:
        assert self._taking is not None, "the scheduler's side was not given the manager"
        return self._taking

    @property
    def _gives(self) -> Giving:
        assert self._giving is not None, "the scheduler's side was not given the manager"
        return self._giving

    def has_pending_work(self) -> bool:
        """Whether prefixes are held or given back, or orders wait for a step."""
        return bool(len(self._gives) or self._num_returning or not self._orders.is_empty())

    def on_new_request(self, request: Request) -> None:
        """Read what a request asks of its transfer.

        Raises:
            UserInputError: It is malformed, of another prompt, or not what this server does.
        """
        settings = self._settings
        asked = read_transfer_request(
            request, can_give=settings.can_give, can_take=settings.can_take
        )
        if asked.gives:
            self._gives.add(request)
        if asked.takes is not None:
            self._takes.add(request, asked.takes)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to load behind the local hit; loads run beside the steps."""
        num_tokens = self._takes.find_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load of an admitted request, or give back what it does not need."""
        self._takes.begin(request, num_external_tokens, self._orders)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's orders, and begin the next one's."""
        orders, self._orders = self._orders, HandoverOrders()
        self._num_returning += len(orders.returned)
        return orders

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            self._takes.settle(request_id, self._orders)
        for request_id in connector_output.failed_recving:
            self._takes.settle(request_id, self._orders)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, HandoverReport):
            self._num_returning = report.num_returning
            self._takes.give_up(report.failed, self._orders)
            self._gives.release(report.ended_leases.items())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold a request's prefix if it asked for that; its own blocks need not wait."""
        self._takes.end(request, self._orders)
        return False, self._gives.end(request, self._orders)

    def withdraw(self, names: Sequence[str]) -> None:
        """Let go of held prefixes, by their leases."""
        self._gives.withdraw(names, self._orders)

    # ---- the worker's side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors, and begin to answer other engines.

        Raises:
            ConfigError: The port is taken, or a peer that is up does not match.
        """
        assert self._kv_cache_config is not None
        self._worker = HandoverWorker(
            self._vllm_config,
            self._settings,
            self._kv_cache_config,
            kv_caches,
            self._make_data_plane,
            self._rank,
        )

    def _make_data_plane(self, memory: RowMemory) -> DataPlane | None:
        """Return what rows travel by; None: the connection itself."""
        return None

    @property
    def _loader(self) -> HandoverWorker:
        assert self._worker is not None, "the worker's side was not given the KV caches"
        return self._worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin what the step orders."""
        orders = self._get_connector_metadata()
        assert isinstance(orders, HandoverOrders)
        self._loader.apply(orders)

    def wait_for_save(self) -> None:
        """Return at once: blocks that others read are held."""

    def build_connector_worker_meta(self) -> HandoverReport:
        """Return which leases ended."""
        return self._loader.make_report()

    def shutdown(self) -> None:
        """Stop all transfers."""
        if self._worker is not None:
            self._worker.shutdown()
