"""A holder and a puller without sockets or models: time, pools of bytes, whose rows are whose."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.handover.frames import Buffer
from vllm.distributed.kv_transfer.handover.leases import LeaseTable
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.regions import Region, list_regions
from vllm.distributed.kv_transfer.handover.serving import find_block
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.pool.exports import PrefixBlocks

# A dense group with a row per four tokens, a window of 40 tokens, a state that some ends need.
GROUPS = (
    GroupGeometry(0, is_window=False, block_size=64, ratio=4),
    GroupGeometry(1, is_window=True, block_size=16, keep=39),
    GroupGeometry(2, is_window=True, block_size=8, align=64),
)
UNIT = 16
MANIFEST = {"protocol": "1", "block_size": "16"}
NUM_BLOCKS = 64
_BLOCK_BYTES = 64
LEASE_S = 15.0


class Clock:
    """Time, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def read(self) -> float:
        """Return the time."""
        return self.now

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Let something happen later."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now + delay_s, self._num_events, what))

    def run(self, until: float) -> None:
        """Let everything happen up to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until


class BytePool:
    """Blocks of bytes, as ``RowMemory``; a block that is taken still holds what it held before."""

    def __init__(self, rng: random.Random) -> None:
        self._bytes = bytearray(rng.randbytes(NUM_BLOCKS * _BLOCK_BYTES))
        self._rng = rng
        self.free = list(range(NUM_BLOCKS))

    def take(self, num_tokens: int, dense_from: int) -> PrefixBlocks:
        """Take the blocks of a prefix."""
        bases, tables = [], []
        for group in GROUPS:
            span = group.rows_below(num_tokens) if group.is_window else range(0)
            if not group.is_window:
                span = range(group.num_dense_blocks(num_tokens))
            self._rng.shuffle(self.free)
            tables.append(tuple(self.free.pop() for _ in span))
            bases.append(span.start)
        return PrefixBlocks(num_tokens, dense_from, tuple(bases), tuple(tables))

    def give_back(self, blocks: PrefixBlocks) -> None:
        """Free the blocks; others may write them from now on."""
        for table in blocks.block_ids:
            for block_id in table:
                start = block_id * _BLOCK_BYTES
                self._bytes[start : start + _BLOCK_BYTES] = self._rng.randbytes(_BLOCK_BYTES)
                self.free.append(block_id)

    def target(self, region: Region, block_id: int) -> list[memoryview]:
        """Return a region's bytes: one per token, in two pieces."""
        start = block_id * _BLOCK_BYTES
        offset = region.first - region.block_index * GROUPS[region.group_id].block_size
        low, high = start + offset, start + offset + region.end - region.first
        view, middle = memoryview(self._bytes), (low + high) // 2
        return [view[low:middle], view[middle:high]]

    def source(self, region: Region, block_id: int) -> list[Buffer]:
        """Return a region's bytes."""
        return list(self.target(region, block_id))

    def commit(self, region: Region, block_id: int, received: list[memoryview]) -> None:
        """Do nothing."""


def rows_of(prompt: int, region: Region) -> bytes:
    """Return what the rows of a prompt are: no two prompts, groups or places have the same."""
    rng = random.Random(f"{prompt}/{region.group_id}")
    return rng.randbytes(region.end)[region.first :]


@dataclass
class Peer:
    """The holder's process: what is gone when it is killed."""

    clock: Clock
    pool: BytePool
    me: Hello
    leases: LeaseTable = field(init=False)
    held: dict[str, PrefixBlocks] = field(default_factory=dict)
    is_up: bool = True

    def __post_init__(self) -> None:
        self.leases = LeaseTable(self.clock.read)

    def offer(self, lease: str, prompt: int, num_tokens: int) -> None:
        """Compute a prompt, and hold it."""
        blocks = self.pool.take(num_tokens, 0)
        for region in list_regions(GROUPS, num_tokens, 0):
            data = memoryview(rows_of(prompt, region))
            for piece in self.pool.target(
                region, find_block(blocks.bases, blocks.block_ids, region)
            ):
                piece[:] = data[: len(piece)]
                data = data[len(piece) :]
        self.held[lease] = blocks
        self.leases.offer(lease, blocks, LEASE_S)

    def step(self) -> None:
        """Free what ended, as a scheduler's step does."""
        for lease in self.leases.collect() if self.is_up else ():
            self.pool.give_back(self.held.pop(lease))

    def die(self) -> None:
        """Lose everything."""
        self.is_up = False
        for blocks in self.held.values():
            self.pool.give_back(blocks)
        self.held.clear()

    def start_again(self, manifest: dict[str, str]) -> None:
        """Come up as another run, perhaps of another model."""
        self.me = Hello(manifest, self.me.engine_id, self.me.instance + "'")
        self.leases = LeaseTable(self.clock.read)
        self.is_up = True
