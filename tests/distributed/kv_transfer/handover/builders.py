"""A holder and a puller that share a process: settings, pools of bytes, prefixes."""

import random
from dataclasses import dataclass, field

from benchmarks.transfer_engines import GROUPS, MANIFEST, BytePool, rows_of
from vllm.distributed.kv_transfer.handover.leases import LeaseTable
from vllm.distributed.kv_transfer.handover.messages import Hello
from vllm.distributed.kv_transfer.handover.params import RemotePrefix
from vllm.distributed.kv_transfer.handover.pulling import Load, PullTimeouts, Returning
from vllm.distributed.kv_transfer.handover.regions import list_regions
from vllm.distributed.kv_transfer.handover.serving import Serving, find_block
from vllm.v1.core.pool.exports import PrefixBlocks

ME = Hello(dict(MANIFEST), "puller", "run-d")
PULL_TIMEOUTS = PullTimeouts()
HOLDER = Hello(dict(MANIFEST), "holder", "run-p")


@dataclass
class Engines:
    """Both engines' memories; time stands still unless a test moves it."""

    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def __post_init__(self) -> None:
        self.giving, self.taking = BytePool(self.rng), BytePool(self.rng)
        self.leases = LeaseTable(lambda: self.now)
        self._generation = 100

    def serving(self, me: Hello = HOLDER) -> Serving:
        """The holder's side of a connection."""
        return Serving(me, GROUPS, self.leases, self.giving)

    def offer(self, lease: str, prompt: int, num_tokens: int = 128) -> PrefixBlocks:
        """Let the holder hold a prompt's rows."""
        blocks = self.giving.take(num_tokens, 0)
        self._fill(blocks, prompt)
        self.leases.offer(lease, blocks, 10.0)
        return blocks

    def _fill(self, blocks: PrefixBlocks, prompt: int) -> None:
        for region in list_regions(GROUPS, blocks.num_tokens, 0):
            data = memoryview(rows_of(prompt, region))
            block_id = find_block(blocks.bases, blocks.block_ids, region)
            for piece in self.giving.target(region, block_id):
                piece[:] = data[: len(piece)]
                data = data[len(piece) :]

    def remote(self, lease: str, num_tokens: int = 128, port: int = 1) -> RemotePrefix:
        """What the holder answered."""
        return RemotePrefix("holder", "run-p", "127.0.0.1", port, lease, num_tokens, "digest")

    def load(
        self,
        lease: str,
        num_tokens: int = 128,
        dense_from: int = 0,
        port: int = 1,
        timeouts: PullTimeouts = PULL_TIMEOUTS,
        deadline_s: float = 20.0,
    ) -> tuple[Load, PrefixBlocks]:
        """The puller's load, and where it goes."""
        blocks = self.taking.take(num_tokens, dense_from)
        regions = list_regions(GROUPS, num_tokens, dense_from)
        remote = self.remote(lease, num_tokens, port)
        load = Load(
            *(ME, remote, blocks, regions, self.taking, self._next),
            *(self.now + deadline_s, self.now, timeouts),
        )
        return load, blocks

    def returning(self, lease: str, port: int = 1) -> Returning:
        """The puller's word that it needs a lease no more."""
        remote = self.remote(lease, port=port)
        return Returning(ME, remote, self.now + 20.0, self.now, PullTimeouts())

    def has_rows(self, blocks: PrefixBlocks, prompt: int) -> bool:
        """Whether the puller has exactly the rows it lacked of a prompt."""
        return all(
            b"".join(
                bytes(piece)
                for piece in self.taking.target(
                    region, find_block(blocks.bases, blocks.block_ids, region)
                )
            )
            == rows_of(prompt, region)
            for region in list_regions(GROUPS, blocks.num_tokens, blocks.dense_from)
        )

    def _next(self) -> int:
        self._generation += 1
        return self._generation
