"""A tier without an engine: real stores in memory, a pool that has whatever it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.pool.exports import PlacedCheckpoint, PrefixBlocks
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.layout import LayerRows, ObjectLayout
from vllm.v1.kv_offload.orders import OffloadOrders, OffloadReport
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.host_store import make_host_store
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey, Reservation
from vllm.v1.kv_offload.tier import Tier
from vllm.v1.messages import HeldPrefix
from vllm.v1.request import Request

UNIT, GROUP = 16, 32
# Of a group's rows at one worker.
ROWS_BYTES = GROUP * 64
WORKERS = 2
_ROOM = 1 << 20

_DENSE, _WINDOW = GroupGeometry(0, False, UNIT), GroupGeometry(1, True, UNIT, keep=UNIT - 1)
_LAYERS = (LayerRows(UNIT, 64),)
ROWS_ALONE = ObjectLayout((_DENSE,), (_LAYERS,), UNIT, UNIT, GROUP)
WITH_STATES = ObjectLayout((_DENSE, _WINDOW), (_LAYERS, _LAYERS), UNIT, UNIT, GROUP)


def make_store(max_bytes: int = _ROOM) -> ObjectStore:
    store = make_host_store([ROWS_BYTES], 1, max_bytes)
    assert store is not None
    return store


def make_request(name: str, num_tokens: int, seed: int = 0, **params: Any) -> Request:
    """A prompt; those of one seed begin alike."""
    return Request(
        name,
        [seed * 1000 + i for i in range(num_tokens)],
        SamplingParams(max_tokens=64, **params),
        block_hasher=get_request_block_hasher(UNIT, sha256),
    )


def rows_key(request: Request, end: int) -> ObjectKey:
    return ObjectKey.of(ObjectKind.ROWS, request.block_hashes[end // UNIT - 1])


class FakeCoordinator:
    """Has all rows but lost ones; its checkpoints and their standing are set."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.checkpoints: list[PlacedCheckpoint] = []
        self.standing: dict[int, CheckpointStanding] = {}
        self.rebuild_tokens: int | None = None

    def list_checkpoints(self, _hashes: Any, end: int) -> Sequence[PlacedCheckpoint]:
        return [place for place in self.checkpoints if place.position <= end]

    def find_standing(self, _hashes: Any, position: int) -> CheckpointStanding | None:
        return self.standing.get(position)

    def locate_rows(self, _hashes: Any, first: int, end: int) -> PrefixBlocks | None:
        return None if end in self.lost else PrefixBlocks(end, first, (0,), ((1, 2),))

    def locate_checkpoint(self, _hashes: Any, end: int, first: int) -> PrefixBlocks | None:
        return PrefixBlocks(end, first, (0, 0), ((1, 2), (3,)), next_token=7)

    def find_import(
        self, _request: Request, num_tokens: int, num_external: int, next_token: int | None
    ) -> PrefixBlocks:
        return PrefixBlocks(num_tokens, num_tokens - num_external, (0,), ((1,),), next_token)

    def held_prefixes(self) -> Sequence[HeldPrefix]:
        return ()


class FakeKeeper:
    """A disk that does at once what it is asked."""

    path = Path("folder")
    is_digesting = False
    num_uncommitted = 0

    def __init__(self, store: ObjectStore, max_bytes: int, small: dict[str, bytes]) -> None:
        self._store = store
        self.max_bytes = max_bytes
        self.small = small
        self.is_opening = False
        self._committed: list[ObjectKey] = []

    @property
    def store(self) -> ObjectStore | None:
        return None if self.is_opening else self._store

    def bind_wake(self, wake: Callable[[], None]) -> None:
        pass

    def commit(self, reservations: Sequence[Reservation]) -> None:
        self._committed += [done.spec.key for done in self._store.writer.commit(reservations)]

    def make_room(self) -> None:
        self._store.writer.make_room()

    def recall(self, name: str) -> bytes | None:
        return self.small.get(name)

    def remember(self, name: str, data: bytes) -> None:
        self.small[name] = data

    @property
    def has_committed(self) -> bool:
        return bool(self._committed)

    def take_committed(self) -> list[ObjectKey]:
        committed, self._committed = self._committed, []
        return committed

    def clear(self) -> bool:
        return self._store.writer.clear()

    def close(self) -> None:
        pass


class TierRig:
    """A tier of two workers.

    Args:
        disk: Its store; None: there is no disk.
        host: The same for host memory.
        layout: What objects are made of.
        max_bytes: The folder's limit.
        small: The folder's small files.
        **settings: Of the tier.
    """

    def __init__(
        self,
        disk: ObjectStore | None = None,
        host: ObjectStore | None = None,
        layout: ObjectLayout = ROWS_ALONE,
        max_bytes: int = 1 << 30,
        small: dict[str, bytes] | None = None,
        **settings: Any,
    ) -> None:
        self.coordinator = FakeCoordinator()
        self.pool = SimpleNamespace(num_scratch_blocks=100, num_gpu_blocks=100)
        self.keeper = None
        if disk is not None:
            self.keeper = FakeKeeper(disk, max_bytes, {} if small is None else small)
        self.now = 1000.0
        defaults = {
            "write_policy": "write_through",
            "write_budget_per_day": None,
            "warm": 0,
            "always_restore": True,
            "host_bytes": 0,
            "read_only": False,
        }
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=WORKERS, data_parallel_size=1),
            speculative_config=None,
            kv_events_config=None,
        )
        manager: Any = SimpleNamespace(
            coordinator=self.coordinator,
            block_pool=self.pool,
            look_up=lambda _request: SimpleNamespace(num_tokens=0, blocks=()),
        )
        made: Any = SimpleNamespace(**{**defaults, **settings})
        self.tier = Tier(config, made, manager, layout, host, self.keeper)
        self.tier.use_clock(lambda: self.now, lambda: self.now)
        self.tier.begin_own_loads()

    def step(self, request: Request | None = None, computed: int = 0) -> OffloadOrders:
        """Schedule a step of a request, after which it has computed so many tokens."""
        output = SchedulerOutput.make_empty()
        if request is not None:
            output.num_scheduled_tokens = {request.request_id: computed}
            request.num_computed_tokens = computed
        return self.tier.make_orders(output)

    def begin(self, request: Request) -> Request:
        self.tier.tracker.add(request)
        return request

    def settle(self, orders: OffloadOrders) -> None:
        """All workers have written what was ordered."""
        written = {order.disk.sequence: WORKERS for order in orders.writes if order.disk}
        self.tier.take_report(OffloadReport(written=written))

    def keep(self, request: Request) -> None:
        """Compute a prompt, and have its rows written."""
        self.begin(request)
        self.settle(self.step(request, request.num_tokens))
        self.tier.end(request)
        self.settle(self.step())
        # What waited for the limit of bytes that are on their way.
        while (orders := self.step()).writes:
            self.settle(orders)
        self.tier.take_events()

    def restore(self, request: Request) -> int | None:
        """Ask for a prompt and order its restore, if there is one."""
        found = self.tier.restores.find_tokens(request, 0)
        if found:
            self.tier.restores.begin(request, found)
        return found
