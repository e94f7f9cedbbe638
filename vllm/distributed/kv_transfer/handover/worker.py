"""The worker's side of a handover: loads what it is told to, answers those who pull."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.handover.direct import DataPlane
from vllm.distributed.kv_transfer.handover.host_memory import HostMemory
from vllm.distributed.kv_transfer.handover.leases import LeaseTable
from vllm.distributed.kv_transfer.handover.manifest import make_manifest
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.orders import (
    HandoverOrders,
    HandoverReport,
    LoadOrder,
)
from vllm.distributed.kv_transfer.handover.peers import PeerCheck
from vllm.distributed.kv_transfer.handover.pulling import Conversation, Load, Returning
from vllm.distributed.kv_transfer.handover.regions import list_regions, read_groups
from vllm.distributed.kv_transfer.handover.serving import RowMemory, Serving
from vllm.distributed.kv_transfer.handover.settings import HandoverSettings
from vllm.distributed.kv_transfer.handover.tcp import TcpHolder, TcpPuller
from vllm.logger import init_logger

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.handover.staged_memory import StagedMemory
    from vllm.v1.core.geometry import GroupGeometry
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


class HandoverWorker:
    """One worker's transfers.

    Owns: its leases, its listening socket, its threads.

    Args:
        config: All configuration.
        settings: Of the connector.
        kv_cache_config: Groups and size of the KV cache.
        kv_caches: Every layer's view of the pool.
        make_data_plane: Makes what rows travel by, if that is not the connection.
        rank: The worker's index among those that share its model; it talks to the same of others.

    Raises:
        ConfigError: The port is taken, or a peer that is up does not match.
        CheckpointError: The checkpoint's files cannot be read.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: HandoverSettings,
        kv_cache_config: KVCacheConfig,
        kv_caches: Mapping[str, torch.Tensor],
        make_data_plane: Callable[[RowMemory], DataPlane | None] = lambda memory: None,
        rank: int = 0,
    ) -> None:
        transfer = config.kv_transfer_config
        assert transfer is not None
        self._settings = settings
        self._rank = rank
        self._groups = read_groups(kv_cache_config)
        self._memory = _make_memory(kv_cache_config, self._groups, kv_caches)
        self._plane = make_data_plane(self._memory)
        transport = "tcp" if self._plane is None else self._plane.name
        if not isinstance(self._memory, HostMemory):
            # Its regions have no padding between pages.
            transport += ", staged"
        manifest = make_manifest(config, kv_cache_config, transport, rank)
        self._me = Hello(manifest, transfer.engine_id or "", transfer.instance_id)
        self._leases = LeaseTable(time.monotonic)
        self._loads: dict[str, Load] = {}
        self._returning: set[Conversation] = set()
        self._failed: set[str] = set()
        self._failed_untold: set[str] = set()
        # No two pulls share a number, nor do those of two engines by any likely chance.
        self._generations = itertools.count(secrets.randbits(62))
        # One buffer serves one load at a time.
        self._puller = TcpPuller(takes_turns=self._plane is not None)
        PeerCheck(self._me, [(host, port + rank) for host, port in settings.peers]).run()
        self._holder: TcpHolder | None = None
        if settings.can_give:
            host, port = settings.host, settings.port + rank
            self._holder = TcpHolder(host, port, self._make_serving)
            logger.info("KV transfer: engine %s gives on %s:%d.", self._me.engine_id, host, port)

    def _make_serving(self) -> Serving:
        writer = None if self._plane is None else self._plane.writer
        return Serving(self._me, self._groups, self._leases, self._memory, writer)

    def apply(self, orders: HandoverOrders) -> None:
        """Begin what a step orders."""
        for name, blocks in orders.offers.items():
            self._leases.offer(name, blocks, self._settings.lease_timeout_s)
        for name in orders.withdrawn:
            self._leases.end(name)
        for order in orders.loads:
            self._begin_load(order)
        for request_id in orders.cancelled:
            load = self._loads.get(request_id)
            if load is not None:
                load.fail("the request ended")
        now = time.monotonic()
        deadline = now + self._settings.load_timeout_s
        for remote in orders.returned:
            returning = Returning(
                self._me, remote.at_rank(self._rank), deadline, now, self._settings.timeouts
            )
            self._returning.add(returning)
            self._puller.begin(returning)

    def _begin_load(self, order: LoadOrder) -> None:
        now = time.monotonic()
        load = Load(
            self._me,
            order.remote.at_rank(self._rank),
            order.blocks,
            list_regions(self._groups, order.blocks.num_tokens, order.blocks.dense_from),
            self._memory,
            self._generations.__next__,
            now + self._settings.load_timeout_s,
            now,
            self._settings.timeouts,
            None if self._plane is None else self._plane.sink,
        )
        self._loads[order.request_id] = load
        self._puller.begin(load)

    def collect(self) -> set[str]:
        """Return the requests whose prefixes came whole; the failed ones are kept for a call."""
        self._returning.difference_update(self._puller.take_ended())
        received: set[str] = set()
        now = time.monotonic()
        ended = [request_id for request_id, load in self._loads.items() if load.has_ended(now)]
        for request_id in ended:
            outcome = self._loads.pop(request_id).outcome
            assert outcome is not None
            if outcome.succeeded:
                received.add(request_id)
            else:
                logger.warning("The KV of request %s did not come: %s.", request_id, outcome.reason)
                self._failed.add(request_id)
                self._failed_untold.add(request_id)
        return received

    def take_failed(self) -> set[str]:
        """Drain the requests whose prefixes did not come."""
        failed, self._failed = self._failed, set()
        return failed

    def make_report(self) -> HandoverReport:
        """Return what the scheduler's side must know."""
        failed, self._failed_untold = frozenset(self._failed_untold), set()
        ended = dict.fromkeys(self._leases.collect(), 1)
        return HandoverReport(ended, len(self._returning), failed)

    def shutdown(self) -> None:
        """Stop everything; idempotent."""
        self._leases.end_all()
        self._puller.shutdown()
        if self._holder is not None:
            self._holder.shutdown()


def _make_memory(
    kv_cache_config: KVCacheConfig,
    groups: tuple[GroupGeometry, ...],
    kv_caches: Mapping[str, torch.Tensor],
) -> HostMemory | StagedMemory:
    if all(view.device.type == "cpu" for view in kv_caches.values()):
        return HostMemory(kv_caches, kv_cache_config.kv_cache_groups, groups)
    # Here, because it needs torch: a front end imports this module to check its settings.
    from vllm.distributed.kv_transfer.handover.staged_memory import (  # noqa: PLC0415
        StagedMemory,
    )

    return StagedMemory(kv_caches, kv_cache_config.kv_cache_groups, groups)
