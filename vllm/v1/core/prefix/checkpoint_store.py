"""The checkpoints of a pool, and their one writer."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from vllm.utils.hashing import BlockHash
from vllm.v1.core.block_pool import TieredPool
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.prefix.prefix_index import PrefixIndex
from vllm.v1.core.retention.policy import ASKED_FOR, RetentionPolicy
from vllm.v1.core.retention.standing import CheckpointEvent as Event
from vllm.v1.core.retention.standing import CheckpointStanding as Standing
from vllm.v1.core.retention.standing import next_standing
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint


class CheckpointStore:
    """The checkpoints of a pool, from publication to eviction.

    Every event moves a checkpoint through the one table of ``retention.standing``; the policy says
    in which tier that puts it, and its free blocks follow.

    Owns: the fields of all checkpoints.

    Args:
        pool: Where the blocks stand.
        index: Where lookups find checkpoints.
        policy: Says which go first, and hears what becomes of them.
    """

    def __init__(self, pool: TieredPool, index: PrefixIndex, policy: RetentionPolicy) -> None:
        self._pool = pool
        self._index = index
        self._policy = policy

    def get(self, prefix_hash: BlockHash) -> Checkpoint | None:
        """Return the checkpoint of a prefix, if there is one."""
        return self._index.checkpoints.get(prefix_hash)

    # ---- from publication to eviction --------------------------------------------------------

    def publish(self, record: Checkpoint, maker: str, *, is_open: bool = False) -> bool:
        """Enter a checkpoint unless one of the same prefix exists.

        Args:
            record: Its standing says what its maker wants of it.
            maker: The request that made it, which runs.
            is_open: Whether its maker holds all its blocks, and calls ``give_back`` or ``close``
                before it gives back some of them.

        Returns:
            Whether the record was entered; else the one that exists is kept if this one is.
        """
        existing = self._index.checkpoints.get(record.prefix_hash)
        if existing is not None and existing.is_partial and not record.is_partial:
            # Whoever may resume at the old one may at this.
            self.dissolve(existing)
            existing = None
        if existing is not None:
            self._note_session(existing, record.session)
            self._publish_again(existing, record)
            return False
        if record.standing in (Standing.KEPT, Standing.JUNCTION):
            record.users = (maker,)
        if record.kind is not None and self._policy.note_made(
            record.kind, is_partial=record.is_partial
        ):
            record.standing = next_standing(record.standing, Event.KIND_PAYS)
        self._rank(record)
        self._index.add_checkpoint(record, is_open=is_open)
        return True

    def give_back(self, records: Sequence[Checkpoint], blocks: Iterable[KVCacheBlock]) -> None:
        """Take note that who made checkpoints is about to give back blocks."""
        if records:
            given = frozenset(blocks)
            for record in records:
                self._index.members.give_back(record, given)

    def close(self, records: Iterable[Checkpoint]) -> None:
        """Take note that who made checkpoints may give back all their blocks from now on."""
        for record in records:
            self._index.members.close(record)

    def _publish_again(self, existing: Checkpoint, record: Checkpoint) -> None:
        """Let a checkpoint be what somebody wants who would have made the same one."""
        if record.standing.is_spare:
            return
        if record.standing is Standing.LEFT:
            self._apply(existing, Event.LEFT_AGAIN)
            return
        if existing.kind is None:
            existing.kind = ASKED_FOR
        is_junction = record.standing is Standing.JUNCTION
        self._apply(existing, Event.PARTED if is_junction else Event.ASKED_FOR)

    def _apply(self, record: Checkpoint, event: Event) -> None:
        """Let an event happen to a checkpoint; its free blocks move if its tier is another."""
        standing = next_standing(record.standing, event)
        if standing is record.standing:
            return
        record.standing = standing
        self._rank(record)
        self._replace(record)

    def _replace(self, record: Checkpoint) -> None:
        """Move a checkpoint's free blocks to where they belong now."""
        if self._index.holds_checkpoint(record):
            self._pool.replace(self._index.members.blocks_of(record))

    def _rank(self, record: Checkpoint) -> None:
        """Ask the policy for a checkpoint's tier."""
        is_lean, is_used = record.is_lean, bool(record.users)
        record.tier = self._policy.tier(record.standing, is_lean=is_lean, is_used=is_used)

    def follow(self, record: Checkpoint, token_id: int) -> None:
        """Note the token that followed, now that it is known."""
        record.next_token = token_id

    def hit(
        self, record: Checkpoint, lean: Checkpoint | None, user: str, session: int | None = None
    ) -> None:
        """A request resumes at a checkpoint; ``lean`` is that of the lean boundary below."""
        for found in (record, lean):
            if found is not None:
                self._note_session(found, session)
        record.num_hits += 1
        record.users = (*record.users, user)
        self._rank(record)
        if self._policy.note_hit(record.kind, record.position):
            for other in self._index.checkpoints.values():
                if other.kind == record.kind:
                    self._apply(other, Event.KIND_PAYS)
        for found in (record, lean):
            if found is not None:
                self._apply(found, Event.HIT)

    @staticmethod
    def _note_session(record: Checkpoint, session: int | None) -> None:
        if session is None or session != record.session:
            record.is_shared = True

    def end_session(self, session: int) -> list[Checkpoint]:
        """Return what only a session used, spare from now on; what runs keeps what it holds."""
        ended = [
            record
            for record in self._index.checkpoints.values()
            if record.session == session and not record.is_shared and not record.users
        ]
        for record in ended:
            # No kind: that it is not hit says nothing of what others will hit.
            record.kind = None
            self._apply(record, Event.ENDED)
        return ended

    def spare(self, record: Checkpoint, kind: int | None) -> None:
        """Keep a checkpoint only as long as nothing else needs its blocks.

        Args:
            record: One that its request has passed.
            kind: As of one that was left near a prompt's end; None: as of one that fills memory.
        """
        record.kind = kind
        self._apply(record, Event.PASSED_FAR if kind is None else Event.PASSED)

    def leave(
        self,
        made: Sequence[Checkpoint],
        origins: Sequence[Checkpoint],
        user: str,
        held: Iterable[KVCacheBlock] = (),
        *,
        again: bool,
        replays: Container[int] = (),
        session: int | None = None,
    ) -> None:
        """A request that resumed at ``origins``, deepest first, and made ``made`` leaves.

        What a conversation began at the time before last is superseded. What it began at this time
        is not: a second answer to the same turn, or an edit of the last one, resumes there, and
        giving it up at once was measured to cost more than it frees.

        Args:
            made: Checkpoints it made that still stand; they age from now.
            origins: The checkpoints it began at, which age from now too.
            user: The request.
            held: The blocks it gives back, in the order in which they shall be reused.
            again: Whether it was preempted before, and goes on with the turn it was at.
            replays: Where a resend of its prompt resumes: of no use once its answer is gone on
                from, where checkpoints are superseded at once.
            session: Its session, which supersedes nothing of others'.
        """
        older = tuple(origins)
        at_once = self._policy.supersedes_at_once
        if origins:
            deepest = origins[0]
            self._let_go(deepest, user)
            may_pass = not again and self._is_own(deepest, session)
            if at_once and may_pass and self._is_passed(deepest, made):
                self._apply(deepest, Event.SUPERSEDED)
            if again:
                older = deepest.older
            else:
                for record in deepest.older:
                    if not record.users and self._is_own(record, session):
                        self._apply(record, Event.SUPERSEDED)
                # Cut here, or a long conversation's records would hold each other for ever.
                deepest.older = ()
        for record in made:
            record.older = older
            if at_once:
                below = [r for r in made if r.position in replays and r.position < record.position]
                record.older = (*older, *below)
            self._let_go(record, user)
        self.close(made)
        aging = [r for r in (*made, *origins) if self._index.holds_checkpoint(r)]
        if not aging:
            self._pool.free_blocks(held)
            return
        # A block of several is as young as the last of them.
        groups = [group for record in reversed(aging) for group in reversed(record.blocks)]
        blocks = dict.fromkeys([block for group in groups for block in reversed(group)])
        self._pool.free_and_age(held, reversed(blocks))

    @staticmethod
    def _is_own(record: Checkpoint, session: int | None) -> bool:
        """Whether a session may supersede a checkpoint; who names none is every session."""
        return session is None or record.session == session

    @staticmethod
    def _is_passed(origin: Checkpoint, made: Sequence[Checkpoint]) -> bool:
        """Whether only one conversation went on at a checkpoint, and has left one further on."""
        is_shared = origin.num_hits > 1 or bool(origin.users)
        return not is_shared and any(r.position > origin.position for r in made)

    def _let_go(self, record: Checkpoint, user: str) -> None:
        record.users = tuple(name for name in record.users if name != user)
        self._rank(record)

    def mark_junction(self, record: Checkpoint) -> None:
        """Keep a checkpoint where continuations were seen to part: never superseded."""
        self._apply(record, Event.PARTED)

    def keep(self, record: Checkpoint) -> None:
        """Let a checkpoint outlive the advance of the request that made it."""
        if record.kind is None:
            record.kind = ASKED_FOR
        self._apply(record, Event.HELD)

    def dissolve(self, record: Checkpoint) -> None:
        """Withdraw a checkpoint; free blocks that serve nothing else fall to SCRATCH."""
        if self._index.holds_checkpoint(record):
            blocks = self._index.remove_checkpoint(record)
            if self._pool.pins is not None:
                self._pool.pins.unpin(record)
            self._pool.replace(blocks)

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, record: Checkpoint) -> bool:
        """Let allocation reach a checkpoint's blocks last; False if it is gone, or too large."""
        pins = self._pool.pins
        assert pins is not None, "pins are off"
        self.close((record,))
        return self._index.holds_checkpoint(record) and pins.pin({record: [*record.all_blocks()]})

    # ---- checks ------------------------------------------------------------------------------

    def find_faults(self, geometry: CacheGeometry) -> Iterator[str]:
        """Say which checkpoints lack blocks that resuming needs, or are pinned and withdrawn."""
        for record in self._index.checkpoints.values():
            for group, blocks in zip(geometry.windows, record.blocks, strict=True):
                needed = group.rows_below(record.position)
                if len(blocks) != len(needed) and not (record.is_partial and group.lazy_reach):
                    yield (
                        f"the record at {record.position} holds {len(blocks)} blocks of group "
                        f"{group.group_id}, needs {len(needed)}"
                    )
        for pinned in self._pool.pins or ():
            if isinstance(pinned, Checkpoint) and not self._index.holds_checkpoint(pinned):
                yield f"the record at {pinned.position} is pinned but withdrawn"
