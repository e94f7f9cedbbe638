"""Engine cores that fill each other's caches: what one uses most, another pulls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from typing_extensions import override

from vllm.distributed.kv_transfer.handover.connector import TcpConnector
from vllm.distributed.kv_transfer.handover.orders import HandoverReport
from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.handover.popular_loads import PopularLoads
from vllm.distributed.kv_transfer.own_loads import stand_in
from vllm.distributed.kv_transfer.used_prefixes import WarmList
from vllm.exceptions import UserInputError
from vllm.v1.messages import PopularPrefix

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import PullStats
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Conversations that are followed.
_MAX_FOLLOWED = 512
# Of a pool, what may be held for neighbours at a time.
_MAX_HELD_SHARE = 0.25


class NeighbourConnector(TcpConnector):
    """Gives neighbours what this core uses most, and takes what they do, when it is told to.

    Clients ask nothing of it: who could would make this core fetch from anywhere. Beside a
    connector that transfers for them it passes over what they ask.

    Owns: what is used most, and the pull that runs, besides.
    """

    _popular: PopularLoads

    shares_caches = True

    @override
    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(manager)
        self._manager = manager
        self._unit = self._unit_of(manager.kv_cache_config)
        self._block_bytes = _block_bytes(manager.kv_cache_config)
        self._used = WarmList(_MAX_FOLLOWED)
        self._popular = PopularLoads(manager, self._unit, self._block_bytes)

    def on_new_request(self, request: Request) -> None:
        """Refuse to transfer what a client says, unless another connector is asked.

        Raises:
            UserInputError: The request has parameters of a transfer that nobody takes.
        """
        if request.kv_transfer_params and not self._settings.leaves_requests:
            raise UserInputError(
                "kv_transfer_params: this server neither prefills for others nor takes what they "
                "prefilled: leave them out.",
                "kv_transfer_params",
            )

    def has_pending_work(self) -> bool:
        """Whether something is held, given back or pulled, or orders wait for a step."""
        return self._popular.is_busy or super().has_pending_work()

    # ---- giving ------------------------------------------------------------------------------

    def offer_popular(self, max_bytes: int) -> Sequence[PopularPrefix]:
        """Hold the prefixes used most, for a neighbour to pull; the most used first."""
        pool = self._manager.block_pool
        room = min(max_bytes // self._block_bytes, int(pool.num_gpu_blocks * _MAX_HELD_SHARE))
        offers: list[PopularPrefix] = []
        held: set[int] = set()
        told: set[bytes] = set()
        for number, used in enumerate(self._used.choose({}, _MAX_FOLLOWED)):
            # Shorter ones first: what follows travels without their rows, and places that
            # conversations share come once.
            for end in self._list_ends(used.hashes):
                if used.hashes[end - 1] in told:
                    continue
                told.add(used.hashes[end - 1])
                found = self._gives.hold(self._stand_in(used.hashes[:end]), self._orders)
                if found is None:
                    continue
                remote, blocks = found
                ids = {block_id for table in blocks.block_ids for block_id in table} - {0}
                held |= ids
                if len(held) > room:
                    self._gives.withdraw([remote.lease], self._orders)
                    return offers
                hashes = used.hashes[: blocks.num_tokens // self._unit]
                offers.append(_describe(hashes, (number, used.weight), remote, len(ids)))
        return offers

    def _stand_in(self, hashes: Sequence[bytes]) -> Request:
        return stand_in(f"popular-{uuid4().hex}", hashes, self._unit)

    def _list_ends(self, hashes: Sequence[bytes]) -> list[int]:
        """Return where a prompt like this one can be resumed, in units, ascending."""
        prompt, end = self._stand_in(hashes).block_hashes, len(hashes) * self._unit
        places = self._manager.coordinator.list_checkpoints(prompt, end)
        return sorted({len(hashes), *(place.position // self._unit for place in places)})

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take note of what was used."""
        self._used.note_request(request, self._unit)
        return super().request_finished_all_groups(request, block_ids)

    # ---- taking ------------------------------------------------------------------------------

    def take_popular(
        self,
        prefixes: Sequence[PopularPrefix],
        max_bytes: int,
        seconds: float,
        tell: Callable[[PullStats], None],
    ) -> None:
        """Pull prefixes that neighbours hold, in order, within a budget."""
        self._popular.add(prefixes, max_bytes, seconds, tell)

    def begin_own_loads(self) -> None:
        """Begin the next pull."""
        self._popular.begin(self._orders)

    def take_pull_stats(self) -> PullStats | None:
        """Return what was pulled since the last call."""
        return self._popular.take_stats()

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_ids, has_failed in (
            (connector_output.finished_recving, False),
            (connector_output.failed_recving, True),
        ):
            for request_id in tuple(request_ids or ()):
                if self._popular.settle(request_id, self._orders, has_failed=has_failed):
                    # No request waits for it.
                    request_ids.remove(request_id)  # type: ignore[union-attr]
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, HandoverReport):
            # Of several workers the others give up, too.
            self._orders.cancelled += filter(self._popular.is_loading, report.failed)


def _describe(
    hashes: list[bytes], conversation: tuple[int, float], remote: RemotePrefix, num_blocks: int
) -> PopularPrefix:
    return PopularPrefix(
        hashes,
        conversation[0],
        remote.engine_id,
        remote.instance,
        remote.host,
        remote.port,
        remote.lease,
        remote.num_tokens,
        remote.next_token,
        num_blocks,
        conversation[1],
    )


def _block_bytes(config: KVCacheConfig) -> int:
    return sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
