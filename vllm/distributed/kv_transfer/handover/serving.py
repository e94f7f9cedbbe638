"""The prefilling engine's side of one connection: frames in, frames out, no socket."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from vllm.distributed.kv_transfer.handover.direct import RowWriter
from vllm.distributed.kv_transfer.handover.frames import (
    Buffer,
    FrameError,
    Head,
    Kind,
    check_control,
    control_frame,
    digest_payload,
    rows_key,
)
from vllm.distributed.kv_transfer.handover.leases import Lease, LeaseTable
from vllm.distributed.kv_transfer.handover.manifest import find_mismatch
from vllm.distributed.kv_transfer.handover.messages import (
    Hello,
    Pull,
    Refuse,
    Release,
    decode,
    encode,
)
from vllm.distributed.kv_transfer.handover.regions import Region, list_regions
from vllm.v1.core.geometry import GroupGeometry

Frame = Sequence[Buffer]


class RowMemory(Protocol):
    """Where the rows of a worker's KV cache lie. All buffers of one region, in one order."""

    def source(self, region: Region, block_id: int) -> list[Buffer]:
        """Return a region's bytes to send; they stay valid while its lease is read."""

    def target(self, region: Region, block_id: int) -> list[memoryview]:
        """Return where a region's bytes are to be received."""

    def commit(self, region: Region, block_id: int, received: list[memoryview]) -> None:
        """Put received bytes, now verified, where the model reads them."""


class Serving:
    """Answers one connection.

    Owns: whether the other side was greeted.

    Args:
        me: This engine.
        groups: Of its KV cache.
        leases: What may be read.
        memory: Where it lies.
        writer: Writes rows into the puller's memory, if that is how they travel.
    """

    def __init__(
        self,
        me: Hello,
        groups: Sequence[GroupGeometry],
        leases: LeaseTable,
        memory: RowMemory,
        writer: RowWriter | None = None,
    ) -> None:
        self._writer = writer
        self._me = me
        self._groups = groups
        self._leases = leases
        self._memory = memory
        self._is_greeted = False

    @property
    def is_greeted(self) -> bool:
        """Whether the other side is an engine that goes with this one."""
        return self._is_greeted

    def handle(self, head: Head, payload: Buffer) -> Generator[Frame, None, None]:
        """Yield the frames that answer one; each is sent before the next is made.

        Raises:
            FrameError: The connection is of no further use.
        """
        data = check_control(head, payload)
        if head.kind is Kind.HELLO:
            yield self._greet(decode(data, Hello))
        elif not self._is_greeted:
            raise FrameError(f"a {head.kind.name} frame came before any greeting")
        elif head.kind is Kind.PULL:
            yield from self._serve(decode(data, Pull), head.generation)
        elif head.kind is Kind.RELEASE:
            self._leases.end(decode(data, Release).lease)
            yield control_frame(Kind.RELEASED, data)
        else:
            raise FrameError(f"a {head.kind.name} frame came to the engine that sends them")

    def _greet(self, other: Hello) -> Frame:
        mismatch = find_mismatch(self._me, other)
        if mismatch is not None:
            return control_frame(Kind.REFUSE, encode(Refuse(mismatch)))
        self._is_greeted = True
        return control_frame(Kind.WELCOME, encode(self._me))

    def _serve(self, pull: Pull, generation: int) -> Iterator[Frame]:
        lease = self._leases.begin_reading(pull.lease)
        if lease is None:
            is_gone = self._leases.is_gone(pull.lease)
            reason = f"lease {pull.lease} " + ("has ended" if is_gone else "is not known")
            yield _fail(reason, generation, is_final=is_gone)
            return
        try:
            yield from self._send_rows(lease, pull, generation)
        finally:
            self._leases.end_reading(lease)

    def _send_rows(self, lease: Lease, pull: Pull, generation: int) -> Iterator[Frame]:
        blocks = lease.blocks
        is_sane = pull.num_tokens == blocks.num_tokens and 0 <= pull.dense_from <= pull.num_tokens
        regions = list_regions(self._groups, pull.num_tokens, pull.dense_from) if is_sane else ()
        if len(regions) != pull.num_regions or any(
            not 0 <= first < end <= len(regions) for first, end in pull.wanted
        ):
            reason = (
                f"lease {lease.name} holds {blocks.num_tokens} tokens; {pull.num_regions} regions "
                f"of {pull.num_tokens} tokens from {pull.dense_from} on do not fit it"
            )
            yield _fail(reason, generation, is_final=True)
            return
        address = pull.address
        for first, end in pull.wanted:
            for index in range(first, end):
                if lease.has_ended:
                    yield _fail(f"lease {lease.name} has ended", generation, is_final=True)
                    return
                frame = self._rows(lease, regions[index], generation, index)
                if pull.session:
                    length = sum(memoryview(piece).nbytes for piece in frame[1:])
                    frame = self._write(frame, pull.session, address)
                    address += length
                yield frame
        yield control_frame(Kind.END, b"", generation)

    def _rows(self, lease: Lease, region: Region, generation: int, index: int) -> Frame:
        block_id = find_block(lease.blocks.bases, lease.blocks.block_ids, region)
        payload = self._memory.source(region, block_id)
        digest = digest_payload(rows_key(lease.name, generation, index), payload)
        length = sum(memoryview(piece).nbytes for piece in payload)
        return [Head(Kind.ROWS, generation, index, length, digest).pack(), *payload]

    def _write(self, frame: Frame, session: str, address: int) -> Frame:
        """Write a region's rows into the puller's memory; returns the frame that says so."""
        if self._writer is None:
            raise FrameError("rows were asked for by a transport that this engine does not have")
        self._writer.write(session, address, frame[1:])
        head = replace(Head.unpack(frame[0]), kind=Kind.WRITTEN, length=0)
        return [head.pack()]


def find_block(bases: Sequence[int], block_ids: Sequence[Sequence[int]], region: Region) -> int:
    """Return the id of the block that holds a region."""
    return block_ids[region.group_id][region.block_index - bases[region.group_id]]


def _fail(reason: str, generation: int, *, is_final: bool) -> Frame:
    return control_frame(Kind.FAIL, encode(Refuse(reason, is_final)), generation)
