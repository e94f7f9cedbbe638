"""Making what a step computes visible to later lookups, with hits at one unit."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.utils.hashing import BlockHash
from vllm.v1.core.kv_cache_utils import event_extra_keys
from vllm.v1.core.prefix.prefix_cache import PrefixCache
from vllm.v1.core.prefix.request_cache import RequestCache
from vllm.v1.core.retention.boundaries import step_boundaries, trailing_boundaries
from vllm.v1.core.retention.pinning import num_dropped_blocks
from vllm.v1.core.retention.policy import ASKED_FOR, Spare
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint


class Publisher:
    """Publishes the keys and checkpoints of requests; withdraws those that newer ones replace.

    Owns: nothing. Keys are the index's, checkpoints the store's.

    Args:
        prefixes: What is cached, and the rules for it.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._geometry = prefixes.geometry
        self._policy = prefixes.policy
        self._index = prefixes.index
        self._store = prefixes.store

    def publish(
        self,
        cache: RequestCache,
        end: int,
        boundaries: Sequence[int],
        spares: Sequence[Spare] = (),
    ) -> None:
        """Make the prefixes a step completes visible to later lookups.

        Args:
            cache: The request's, whose hashes cover at least ``end``.
            end: Tokens computed after the step, drafts not counted.
            boundaries: Boundaries the step completes, to keep a checkpoint of.
            spares: Those it completes that nobody asked for.
        """
        # What its client wants to be found ends here.
        end = min(end, cache.request.insert_end)
        self._publish_keys(cache, end)
        for position in boundaries:
            if position <= end:
                self._publish_checkpoint(cache, position)
        if spares:
            self._publish_spares(cache, spares)
            cache.spared_until = end
        self._drop_passed(cache, end)

    def publish_accepted(self, cache: RequestCache) -> None:
        """Publish what drafts accepted since the last publication completed.

        A step publishes the tokens known when it is scheduled. Drafts that it proves right are
        computed by then, so their boundaries must not wait until the window moves on, or the
        request ends.
        """
        if cache.request.skip_cache_insert:
            return
        published, unit = cache.published, self._geometry.unit
        first = published.num_units * unit
        # Tokens behind a stop are computed, but no part of the request.
        end = min(cache.num_accepted, cache.request.num_tokens, cache.request.insert_end)
        if end < first + unit:
            return
        grid = self._policy.grid(first, end)
        self.publish(
            cache, end, step_boundaries(self._geometry, first, end, published.wanted, grid)
        )

    def _publish_keys(self, cache: RequestCache, end: int) -> None:
        unit, published, request = self._geometry.unit, cache.published, cache.request
        block_hashes = request.block_hashes
        first_unit, num_units = published.num_units, end // unit
        if not cache.dense and first_unit < num_units:
            self._publish_chain(block_hashes, first_unit, num_units)
        for table in cache.dense:
            step = max(unit, table.geometry.ratio)
            first = published.num_units * unit // step * step
            ends = range(first + step, end + 1, step)
            if not ends:
                continue
            group_id = table.geometry.group_id
            # The hash of a prefix of p tokens is at p // unit - 1, that of one unit less before it.
            at, stop, stride = ends[0] // unit - 1, end // unit, step // unit
            keys = block_hashes[at:stop:stride]
            parents: Sequence[BlockHash | None] = ()
            if group_id == self._index.lineage_group:
                parents = [
                    block_hashes[at - 1] if at else None,
                    *block_hashes[at + stride - 1 : stop - 1 : stride],
                ]
            blocks = table.blocks_below(ends)
            emptied = self._index.add_keys(
                blocks, group_id, keys, parents, is_spare=request.is_spare
            )
            if emptied:
                self._prefixes.pool.replace_emptied(emptied)
            if self._index.events.is_on:
                self._announce(cache, group_id, keys, range(first, ends[-1], step))
        published.num_units = max(first_unit, num_units)

    def _publish_chain(
        self, block_hashes: Sequence[BlockHash], first_unit: int, num_units: int
    ) -> None:
        """Note which units lead to the checkpoints of a model without dense rows."""
        parent = block_hashes[first_unit - 1] if first_unit else None
        if parent is not None and parent not in self._index.lineage.parents:
            # What led there is gone with the checkpoint at its end, another request's.
            first_unit, parent = 0, None
        units = block_hashes[first_unit:num_units]
        self._index.add_chain(units, [parent, *units[:-1]])

    def _announce(
        self, cache: RequestCache, group_id: int, keys: Sequence[BlockHash], starts: range
    ) -> None:
        """Tell of keys whose tokens begin at ``starts``; the step is how many each stands for."""
        request, step = cache.request, starts.step
        first = starts.start
        extra_keys = event_extra_keys(request, starts, step)
        self._index.events.stored(
            keys,
            request.block_hashes[first // self._geometry.unit - 1] if first else None,
            request.all_token_ids[first : first + len(keys) * step],
            step,
            group_id,
            lora=request.lora_request,
            extra_keys=extra_keys if any(extra_keys) else None,
            session_id=request.options.session_id,
        )

    def _announce_checkpoint(self, cache: RequestCache, record: Checkpoint) -> None:
        """Tell of a checkpoint: where no dense rows do, with its tokens from the one before on."""
        index, request = self._index, cache.request
        first, parent, extra_keys = record.position, None, None
        if not cache.dense:
            first, parent = self._find_parent(request.block_hashes, record.position)
            keys = event_extra_keys(request, (first,), record.position - first)
            extra_keys = keys if any(keys) else None
        for group_id in index.groups_of(record):
            index.events.stored(
                (record.prefix_hash,),
                parent,
                request.all_token_ids[first : record.position],
                record.position - first,
                group_id,
                lora=request.lora_request,
                extra_keys=extra_keys,
                session_id=request.options.session_id,
            )

    def _find_parent(
        self, block_hashes: Sequence[BlockHash], position: int
    ) -> tuple[int, BlockHash | None]:
        """Return the last boundary before a checkpoint that has one too, and its prefix."""
        unit = self._geometry.unit
        for num_units in range(position // unit - 1, 0, -1):
            if block_hashes[num_units - 1] in self._index.checkpoints:
                return num_units * unit, block_hashes[num_units - 1]
        return 0, None

    def _publish_checkpoint(self, cache: RequestCache, position: int) -> None:
        published, request = cache.published, cache.request
        token_ids = request.following_tokens
        next_token = token_ids[position] if position < len(token_ids) else None
        standing, kind = CheckpointStanding.LEFT, None
        if position in published.junctions:
            standing, kind = CheckpointStanding.JUNCTION, ASKED_FOR
        elif request.is_spare and position in published.wanted:
            standing = CheckpointStanding.SPARE
        elif position in published.wanted or self._is_kept(cache, position):
            standing = CheckpointStanding.KEPT
            kind = self._policy.kind_of(position, request.num_prompt_tokens)
        record = Checkpoint(
            request.block_hashes[position // self._geometry.unit - 1],
            position,
            tuple(
                window.blocks_for(position) if cache.holds_rows(window, position) else ()
                for window in cache.windows
            ),
            next_token,
            standing,
            is_lean=position % self._geometry.lean == 0,
            kind=kind,
            session=request.session,
            is_partial=position < cache.full_from,
        )
        # Its blocks are in the request's tables; see ``give_back``.
        if self._store.publish(record, request.request_id, is_open=True):
            if self._index.events.is_on:
                self._announce_checkpoint(cache, record)
            if next_token is None:
                published.unfollowed = record
            is_left = standing is CheckpointStanding.LEFT
            (published.trailing if is_left else published.kept).append(record)

    def _is_kept(self, cache: RequestCache, position: int) -> bool:
        """Whether the policy keeps a boundary whatever its request wants."""
        if position in self._policy.grid(position - 1, position):
            return True
        request = cache.request
        return bool(request.cache_boundaries) and position in self._policy.marked_boundaries(
            request.num_prompt_tokens, request.cache_boundaries
        )

    def _publish_spares(self, cache: RequestCache, spares: Sequence[Spare]) -> None:
        """Enter checkpoints that nobody asked for: many, so without what kept ones need."""
        hashes, unit = cache.request.block_hashes, self._geometry.unit
        token_ids = cache.request.following_tokens
        num_tokens = len(token_ids)
        spared, maker = cache.published.spared, cache.request.request_id
        positions = [spare.position for spare in spares]
        # By window group: for each spare checkpoint its blocks.
        held = [
            window.runs_below(positions, num_blocks)
            for window, num_blocks in zip(cache.windows, self._geometry.lean_blocks, strict=True)
        ]
        for (position, kind), *blocks in zip(spares, *held, strict=True):
            rows = zip(cache.windows, blocks, strict=True)
            record = Checkpoint(
                hashes[position // unit - 1],
                position,
                tuple(own if cache.holds_rows(window, position) else () for window, own in rows),
                token_ids[position] if position < num_tokens else None,
                CheckpointStanding.FILLER if kind is None else CheckpointStanding.SPARE,
                kind=kind,
                session=cache.request.session,
                is_partial=position < cache.full_from,
                num_behind=cache.request.num_prompt_tokens - position,
            )
            if kind is not None:
                spared[position] = kind
            if self._store.publish(record, maker) and self._index.events.is_on:
                self._announce_checkpoint(cache, record)

    def _drop_passed(self, cache: RequestCache, end: int) -> None:
        """Give up trailing checkpoints that newer ones replace, unless somebody resumed there."""
        current = trailing_boundaries(self._geometry, end)
        num_prompt_tokens = cache.request.num_prompt_tokens
        remaining = []
        for record in cache.published.trailing:
            if record.position in current:
                remaining.append(record)
                continue
            is_wanted = record.num_hits or record.standing is not CheckpointStanding.LEFT
            if not is_wanted and not self._policy.stays_when_passed(
                record.position, num_prompt_tokens
            ):
                self._store.dissolve(record)
                continue
            self._store.close((record,))
            if not is_wanted:
                self._store.spare(record, cache.published.spared.get(record.position))
        cache.published.trailing = remaining

    def spare_trailing(self, cache: RequestCache) -> None:
        """Let where a request stopped go first, unless somebody resumed there."""
        for record in cache.published.trailing:
            if record.standing is CheckpointStanding.LEFT and not record.num_hits:
                self._store.spare(record, None)

    def give_back(self, cache: RequestCache, blocks: Sequence[KVCacheBlock]) -> None:
        """Give back blocks that a request does not need any more, as its checkpoints may."""
        published = cache.published
        self._store.close(published.kept[published.num_closed :])
        published.num_closed = len(published.kept)
        # They are replaced before most of their blocks are given back.
        self._store.give_back(published.trailing, blocks)
        self._prefixes.pool.free_blocks(blocks)

    def publish_copies(self, cache: RequestCache) -> None:
        """Let copies carry their source's keys below the boundary."""
        if cache.request.skip_cache_insert:
            return
        index, unit = self._index, self._geometry.unit
        for copy in cache.copies:
            # Tokens between two keys of the group.
            step = max(unit, self._geometry.groups[copy.group_id].ratio)
            for prefix_hash in copy.keys:
                parent = index.lineage.parent_of(prefix_hash)
                keys, parents = (prefix_hash,), (parent,)
                emptied = index.add_keys(
                    (copy.destination,),
                    copy.group_id,
                    keys,
                    parents,
                    is_spare=cache.request.is_spare,
                )
                if emptied:
                    self._prefixes.pool.replace_emptied(emptied)
                if index.events.is_on:
                    end = (cache.request.block_hashes.index(prefix_hash) + 1) * unit
                    self._announce(cache, copy.group_id, keys, range(end - step, end, step))

    def follow(self, cache: RequestCache) -> None:
        """Tell a checkpoint which token followed, now that it may be known."""
        record = cache.published.unfollowed
        if record is None:
            return
        token_ids = cache.request.following_tokens
        if record.position < len(token_ids):
            self._store.follow(record, token_ids[record.position])
            cache.published.unfollowed = None

    def note_loaded(self, cache: RequestCache, position: int, next_token: int) -> None:
        """Tell a checkpoint that was loaded which token followed where it was made."""
        for record in (*cache.published.trailing, *cache.published.kept):
            if record.position == position:
                self._store.follow(record, next_token)
                cache.published.unfollowed = None

    def pin_window(self, cache: RequestCache, start: int, end: int) -> None:
        """Pin the checkpoint at which a long step ends; a short step, as in decode, pins nothing.

        Args:
            cache: The request's, whose step was just published.
            start: Tokens computed before the step.
            end: Tokens computed after it.
        """
        pinning = self._prefixes.pinning
        assert pinning is not None, "pins are off"
        if num_dropped_blocks(self._geometry, start, end) < pinning.min_drop_blocks:
            return
        published, num_units = cache.published, end // self._geometry.unit
        if not num_units:
            return
        prefix_hash = cache.request.block_hashes[num_units - 1]
        record = self._store.get(prefix_hash)
        if record is None or not self._store.pin(record):
            return
        self._store.keep(record)
        if record in published.trailing:
            published.trailing.remove(record)
            published.kept.append(record)
