"""The checkpoints of a pool, and their one writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.prefix.checkpoints import Checkpoint, checkpoint_tier
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.prefix.tiers import Tier
from vllm.v1.core.retention.auto.yields import Yields


class CheckpointStore:
    """The checkpoints of a pool, from publication to eviction.

    A verb that changes where a checkpoint's free blocks belong moves them.

    Owns: the fields of all checkpoints, what is known of their kinds.

    Args:
        pool: Where the blocks stand.
        index: Where lookups find checkpoints.
        supersedes: Whether a conversation's checkpoint before last is given up before others.
        spares_live: Whether those of running requests are among the last to go.
    """

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, *, supersedes: bool, spares_live: bool = False
    ) -> None:
        self._pool = pool
        self._index = index
        self._supersedes = supersedes
        self._spares_live = spares_live
        self._yields = Yields()

    def get(self, prefix_hash: BlockHash) -> Checkpoint | None:
        """Return the checkpoint of a prefix, if there is one."""
        return self._index.checkpoints.get(prefix_hash)

    # ---- from publication to eviction --------------------------------------------------------

    def publish(self, record: Checkpoint) -> bool:
        """Enter a checkpoint unless one of the same prefix exists.

        Returns:
            Whether the record was entered; else the one that exists is kept if this one is.
        """
        existing = self.get(record.prefix_hash)
        if existing is None:
            record.has_maker = record.is_kept and self._spares_live
            if self._is_counted(record):
                self._yields.note_made(record.kind)
                if record.kind is not None:
                    record.is_promising = self._yields.is_promising(record.kind)
            self._index.add_checkpoint(record)
            return True
        if record.is_spare:
            return False
        existing.is_kept |= record.is_kept
        existing.is_junction |= record.is_junction
        if existing.is_spare:
            # Somebody asks for it now: as if it were made now.
            existing.is_cold = record.is_cold
            self._promote(existing)
        elif not record.is_cold:
            self._warm(existing)
        return False

    def follow(self, record: Checkpoint, token_id: int) -> None:
        """Note the token that followed, now that it is known."""
        record.next_token = token_id

    def hit(self, record: Checkpoint, lean: Checkpoint | None) -> None:
        """A request resumes at a checkpoint; ``lean`` is that of the lean boundary below."""
        record.num_hits += 1
        record.num_live += 1
        record.num_owners += self._spares_live
        if self._is_counted(record):
            self._note_hit(record.kind)
        for found in (record, lean):
            if found is not None and found.is_spare:
                self._promote(found)

    def _is_counted(self, record: Checkpoint) -> bool:
        """Whether it tells of its kind: it was asked for, or a spare one near a prompt's end."""
        return self._spares_live and (record.is_kept or record.kind is not None)

    def _note_hit(self, kind: int | None) -> None:
        """Take note of what a kind of checkpoint is good for; all of a promising kind move up."""
        yields = self._yields
        was_promising = kind is None or yields.is_promising(kind)
        yields.note_hit(kind)
        if was_promising or kind is None or not yields.is_promising(kind):
            return
        for record in self._index.checkpoints.values():
            if record.is_spare and record.kind == kind and not record.is_promising:
                record.is_promising = True
                self._pool.replace(record.all_blocks())

    def forget_yields(self) -> None:
        """Forget what is known of kinds of checkpoints."""
        self._yields = Yields()

    def spare(self, record: Checkpoint, kind: int | None) -> None:
        """Keep a checkpoint only as long as nothing else needs its blocks.

        Args:
            record: One that its request has passed.
            kind: As of one that was left near a prompt's end; None: as of one that fills memory.
        """
        record.is_spare, record.is_filler, record.kind = True, kind is None, kind
        self._pool.replace(record.all_blocks())

    def leave(
        self, made: Sequence[Checkpoint], origins: Sequence[Checkpoint], *, again: bool
    ) -> None:
        """A request that resumed at ``origins``, deepest first, and made ``made`` leaves.

        What a conversation began at the time before last is superseded. What it began at this time
        is not: a second answer to the same turn, or an edit of the last one, resumes there, and
        giving it up at once was measured to cost more than it frees.

        Args:
            made: Checkpoints it made that still stand; they age from now.
            origins: The checkpoints it began at, which age from now too.
            again: Whether it was preempted before, and goes on with the turn it was at.
        """
        older = tuple(origins)
        if origins:
            deepest = origins[0]
            deepest.num_live -= 1
            deepest.num_owners -= self._spares_live
            if again:
                older = deepest.older
            else:
                for record in deepest.older:
                    self._supersede(record)
                # Cut here, or a long conversation's records would hold each other for ever.
                deepest.older = ()
        for record in made:
            record.older = older
            record.has_maker = False
        for record in (*made, *origins):
            if self._index.holds_checkpoint(record):
                self._pool.replace(record.all_blocks(), even_if_unchanged=True)

    def _supersede(self, record: Checkpoint) -> None:
        if not self._supersedes or record.is_junction or record.num_live:
            return
        if self._index.holds_checkpoint(record):
            record.is_cold = True
            self._pool.replace(record.all_blocks())

    def mark_junction(self, record: Checkpoint) -> None:
        """Keep a checkpoint where continuations were seen to part: never superseded."""
        record.is_junction = True
        self._warm(record)

    def keep(self, record: Checkpoint) -> None:
        """Let a checkpoint outlive the advance of the request that made it."""
        record.is_kept = True

    def _promote(self, record: Checkpoint) -> None:
        """Keep a spare checkpoint as others are kept."""
        record.is_spare = record.is_filler = record.is_promising = False
        self._pool.replace(record.all_blocks())

    def _warm(self, record: Checkpoint) -> None:
        """Keep a checkpoint as others are kept."""
        if checkpoint_tier(record) is Tier.COLD and self._index.holds_checkpoint(record):
            record.is_cold = False
            self._pool.replace(record.all_blocks())

    def dissolve(self, record: Checkpoint) -> None:
        """Withdraw a checkpoint; free blocks that serve nothing else fall to SCRATCH."""
        if self._index.holds_checkpoint(record):
            self._index.remove_checkpoint(record)
            if self._pool.pins is not None:
                self._pool.pins.unpin(record)
            self._pool.replace(record.all_blocks())

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, record: Checkpoint) -> bool:
        """Let allocation reach a checkpoint's blocks last; False if it is gone, or too large."""
        pins = self._pool.pins
        assert pins is not None, "pins are off"
        return self._index.holds_checkpoint(record) and pins.pin({record: [*record.all_blocks()]})

    # ---- checks ------------------------------------------------------------------------------

    def find_faults(self, geometry: CacheGeometry) -> Iterator[str]:
        """Say which checkpoints lack blocks that resuming needs, or are pinned and withdrawn."""
        for record in self._index.checkpoints.values():
            for group, blocks in zip(geometry.windows, record.blocks, strict=True):
                needed = group.rows_below(record.position)
                if len(blocks) != len(needed):
                    yield (
                        f"the record at {record.position} holds {len(blocks)} blocks of group "
                        f"{group.group_id}, needs {len(needed)}"
                    )
        for pinned in self._pool.pins or ():
            if isinstance(pinned, Checkpoint) and not self._index.holds_checkpoint(pinned):
                yield f"the record at {pinned.position} is pinned but withdrawn"
