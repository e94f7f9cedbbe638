"""A control plane without a model: every stored row is tagged with the prefix it came from.

``RowMemory`` plays the worker: it copies, writes and reads rows as a step of the real one does, and
fails as soon as a request would read a row that was not computed from exactly its own prefix.
``Driver`` plays a scheduler over the real manager, with random chunks, victims and arrivals.
"""

import random
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.geometry import CacheGeometry, GroupGeometry
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.policy import AutoPolicy
from vllm.v1.core.retention.pinning import PinSettings
from vllm.v1.core.retention.policy import RetentionPolicy
from vllm.v1.core.retention.registry import make_policy
from vllm.v1.core.values.cache_settings import CacheSettings
from vllm.v1.core.values.cache_step import Lookup, RowBounds, WindowTable
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.messages import PrefillStats
from vllm.v1.request import Request
from vllm.v1.request_options import NO_OPTIONS, RequestOptions

init_none_hash(sha256)

Tag = int
# Of a row that was computed without all rows it depends on.
_INEXACT: Tag = -1
# More than any tag; added to that of a row that some of a group's layers have.
_SOME_LAYERS: Tag = 1 << 80
_ALL_ROWS = RowBounds(())


def make_request(
    request_id: str, tokens: Sequence[int], unit: int, max_tokens: int = 8, **kwargs: object
) -> Request:
    """A request that hashes its units."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(unit, sha256),
        **kwargs,  # type: ignore[arg-type]
    )


class RowMemory:
    """The pool's rows: block id -> (group that wrote last, row -> tag)."""

    def __init__(self, manager: KVCacheManager) -> None:
        coordinator = coordinator_of(manager)
        self._geometry = coordinator.geometry
        self._index = coordinator.index
        self._blocks: dict[int, tuple[int, dict[int, Tag]]] = {}
        self._windows: dict[str, dict[int, WindowTable]] = {}
        self._pool = manager.block_pool
        # How often each block was taken.
        self._num_takes: Counter[int] = Counter()
        self._pool.get_new_blocks = self._count_takes(  # type: ignore[method-assign]
            self._pool.get_new_blocks
        )
        # What was published before this schedule(): block id -> position below which no row may
        # be written any more (I6).
        self._sealed: dict[int, list[tuple[object, int]]] = {}
        self._spread = _find_spread(manager.kv_cache_config)
        self.num_rows_read = 0

    def _count_takes(
        self, take: Callable[[int], list[KVCacheBlock]]
    ) -> Callable[[int], list[KVCacheBlock]]:
        def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
            taken = take(num_blocks)
            self._num_takes.update(block.block_id for block in taken)
            return taken

        return get_new_blocks

    def seal(self, positions: dict[bytes, int]) -> None:
        """Note what is published, before a ``schedule()`` publishes more.

        Args:
            positions: Prefix hash -> its tokens.
        """
        sealed: defaultdict[int, list[tuple[object, int]]] = defaultdict(list)
        for record in self._index.checkpoints.values():
            for block_id in {block.block_id for block in record.all_blocks()}:
                sealed[block_id].append((record, record.position))
        for block in self._pool.blocks:
            if keys := self._index.keys_of(block):
                sealed[block.block_id].append((self._life_of(block), positions[keys[-1]]))
        self._sealed = dict(sealed)

    def _lowest_writable(self, block_id: int) -> int:
        """Return the position below which rows of a block may not change any more."""
        sealed = self._sealed.get(block_id)
        if sealed is None:
            return 0
        block = self._pool.blocks[block_id]
        alive = {self._life_of(block), *self._index.checkpoints_of(block)}
        return max((position for what, position in sealed if what in alive), default=0)

    def _life_of(self, block: KVCacheBlock) -> object:
        """Return what tells keys of a block from those it carries after it was taken again."""
        return None if block.key is None else (self._num_takes[block.block_id], block.key)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Run a step's copies, all sources read before any destination is written."""
        contents = [self._blocks.get(source) for source, _ in pairs]
        assert len({destination for _, destination in pairs}) == len(pairs)
        for (_, destination), content in zip(pairs, contents, strict=True):
            assert content is not None, "a copy reads a block nobody wrote"
            self._blocks[destination] = (content[0], dict(content[1]))

    def update_windows(self, tables: dict[str, tuple[WindowTable, ...]]) -> None:
        """Take the window tables that changed."""
        for request_id, changed in tables.items():
            mine = self._windows.setdefault(request_id, {})
            mine.update({table.group_id: table for table in changed})

    def forget(self, request_id: str) -> None:
        """Drop a request's tables."""
        self._windows.pop(request_id, None)

    def _write(self, group: int, block_id: int, first: int, tags: Sequence[Tag], end: int) -> None:
        """Write rows of one block that follow each other; ``end`` is where the first one does."""
        sealed = self._lowest_writable(block_id)
        assert end > sealed, f"I6: a row below {sealed} is written after its publication"
        owner, rows = self._blocks.get(block_id, (group, {}))
        if owner != group:
            rows = {}  # one page, other layers: the old rows are gone
        rows.update(enumerate(tags, first))
        self._blocks[block_id] = (group, rows)

    def _read(self, group: int, block_id: int, first: int, tags: Sequence[Tag], what: str) -> None:
        """Read rows of one block that follow each other; all that is run is mostly this."""
        assert block_id != 0, f"{what}: the null block is read"
        owner, rows = self._blocks.get(block_id, (-1, {}))
        assert owner == group, f"{what}: block {block_id} holds rows of group {owner}"
        found = [*map(rows.get, range(first, first + len(tags)))]
        if found != tags:
            for row, (own, tag) in enumerate(zip(found, tags, strict=True), first):
                # A row of all layers is one of some, too.
                if own != tag and (own is None or own + _SOME_LAYERS != tag):
                    text = f"{what}: row {row} of block {block_id} is another prefix's"
                    raise AssertionError(text)
        self.num_rows_read += len(tags)

    def _window_block(self, request_id: str, group: int, index: int) -> int:
        table = self._windows[request_id].get(group)
        if table is None or not 0 <= index - table.base < len(table.block_ids):
            return 0
        return table.block_ids[index - table.base]

    def _read_state(self, rid: str, group: GroupGeometry, position: int, tag: Tag) -> None:
        """Go on with the state after ``position`` tokens: all its pieces are of that prefix."""
        for index in group.rows_below(position):
            block = self._window_block(rid, group.group_id, index)
            what = f"{rid} resuming at {position}, state of group {group.group_id}"
            self._read(group.group_id, block, 0, [tag], what)

    def write_state(self, rid: str, group: GroupGeometry, position: int, tag: Tag) -> None:
        """Store the state after ``position`` tokens in the blocks that it was given, if any."""
        blocks = [self._window_block(rid, group.group_id, i) for i in group.rows_below(position)]
        assert all(blocks) or not any(blocks), f"{rid}: a part of a state at {position}"
        for block in filter(None, blocks):
            self._write(group.group_id, block, 0, [tag], position)

    def run(
        self,
        request: Request,
        tags: list[Tag],
        start: int,
        end: int,
        dense: tuple[list[int], ...],
        bounds: RowBounds = _ALL_ROWS,
    ) -> None:
        """Compute tokens [start, end): write what has a slot, read what attention reads.

        Rows that begin without any row below ``bounds.read_from`` are exact in the last layer only
        from ``spread`` tokens further on.
        """
        rid = request.request_id
        exact_from = bounds.read_from + self._spread if bounds.write_from else 0
        window_tags = [_INEXACT] * min(exact_from, len(tags)) + tags[exact_from:]
        states = [group for group in self._geometry.windows if group.is_recurrent]
        rows = [group for group in self._geometry.windows if not group.is_recurrent]
        for group in states:
            if start:
                self._read_state(rid, group, start, tags[start - 1])
        for group in states:
            for position in range(start + 1, end + 1):
                if position % group.align == 0 or position == end:
                    self.write_state(rid, group, position, tags[position - 1])
        for group in rows:
            what = f"{rid} window group {group.group_id} resuming at {start}"
            first = max(group.first_needed(start), bounds.read_from)
            if group.lazy_reach:
                first = max(first, bounds.output_from - group.lazy_reach)
            for index, begin, stop in split_rows(first, start, group.block_size):
                block = self._window_block(rid, group.group_id, index)
                tags_read = window_tags[begin:stop]
                if group.lazy_reach:
                    read = enumerate(tags_read, begin)
                    tags_read = [_leave_out(tag, row, group, bounds) for row, tag in read]
                self._read(group.group_id, block, begin % group.block_size, tags_read, what)
        for group in rows:
            for index, begin, stop in split_rows(start, end, group.block_size):
                block = self._window_block(rid, group.group_id, index)
                if block:
                    written = enumerate(window_tags[begin:stop], begin)
                    own = [_leave_out(tag, row, group, bounds) for row, tag in written]
                    self._write(group.group_id, block, begin % group.block_size, own, begin + 1)
        for group in self._geometry.dense:
            table = dense[group.group_id]
            rows_per_block = group.block_size // group.ratio
            first = max(start, bounds.write_from[group.group_id] if bounds.write_from else 0)
            first, last = first // group.ratio, end // group.ratio
            row_tags = tags[group.ratio - 1 : end : group.ratio]
            for index, begin, stop in split_rows(first, last, rows_per_block):
                row, behind = begin % rows_per_block, (begin + 1) * group.ratio
                self._write(group.group_id, table[index], row, row_tags[begin:stop], behind)
            what = f"{rid} dense group {group.group_id} at {end}"
            for index, begin, stop in split_rows(0, end // group.ratio, rows_per_block):
                self._read(group.group_id, table[index], 0, row_tags[begin:stop], what)


def split_rows(first: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Iterate over the blocks of rows [first, end): a block's index, its first row, one past."""
    while first < end:
        index = first // size
        stop = min((index + 1) * size, end)
        yield index, first, stop
        first = stop


def _leave_out(tag: Tag, row: int, group: GroupGeometry, bounds: RowBounds) -> Tag:
    """Return what a window row holds of which layers may leave some out.

    rows           | none           | those of the first layers | all
    of a group     ^ 0              ^ output - lazy_reach       ^ output - the window
    """
    if not group.lazy_reach or row >= bounds.output_from - group.keep or tag == _INEXACT:
        return tag
    return _INEXACT if row < bounds.output_from - group.lazy_reach else tag + _SOME_LAYERS


def _find_spread(config: KVCacheConfig) -> int:
    """Return how many tokens behind its first a run without earlier window rows is exact.

    That is in the last layer: each layer before it puts off by its window, less one.
    """
    exact_from = [0]
    for group in config.kv_cache_groups:
        for spec in group.layer_specs().values():
            if spec.rebuild_window is not None:
                exact_from.append(exact_from[-1] + spec.rebuild_window - 1)
    return exact_from[-2] if len(exact_from) > 1 else 0


def make_manager(config: KVCacheConfig, max_model_len: int, **kw: Any) -> KVCacheManager:
    """Return a manager of hits at one unit."""
    assert config.hit_unit is not None
    settings = CacheSettings(
        kv_cache_config=config,
        max_model_len=max_model_len,
        max_num_batched_tokens=kw.pop("max_num_batched_tokens", max_model_len),
        scheduler_block_size=config.hit_unit,
        hash_block_size=config.hit_unit,
        **kw,
    )
    return KVCacheManager.from_settings(settings)


def coordinator_of(manager: KVCacheManager) -> CheckpointCoordinator:
    """Return the coordinator behind a manager of hits at one unit."""
    assert isinstance(manager.coordinator, CheckpointCoordinator)
    return manager.coordinator


PolicyMaker = Callable[[CacheGeometry], RetentionPolicy]


class Driver:
    """A small scheduler with random decisions over the real manager."""

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        seed: int,
        *,
        policy: str | int | PolicyMaker = "auto",
        pinning: PinSettings | None = None,
        waits: bool = True,
        is_priority: bool = False,
        rule: Rule | None = None,
    ) -> None:
        assert config.hit_unit is not None
        self.unit = config.hit_unit
        self.rng = random.Random(seed)
        geometry = CacheGeometry.from_config(config)
        made = (
            make_policy(policy, geometry, config.num_blocks - 1)
            if isinstance(policy, str | int)
            else policy(geometry)
        )
        self.manager = make_manager(
            config,
            max_model_len,
            policy=made,
            pinning=pinning,
            enable_kv_cache_events=True,
            allows_lazy=True,
        )
        self.coordinator = coordinator_of(self.manager)
        self.memory = RowMemory(self.manager)
        self.max_model_len = max_model_len
        self.waits = waits
        # An eviction rule that every step begins with, whatever is learnt.
        self.rule = rule
        # First come, first served; else the lower a request's priority, the sooner.
        self.is_priority = is_priority
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.tags: dict[str, list[Tag]] = {}
        self.hits: dict[str, int] = {}
        self.records: dict[str, PrefillStats] = {}
        # Requests that computed window rows again, and where those are exact.
        self.rebuilt: dict[str, int] = {}
        self.finished: dict[str, list[int]] = {}
        self.num_preemptions = 0
        self.num_rebuilds = 0
        self.num_steps = 0
        self.num_copies = 0
        self.peak_pins = 0
        self._next_id = 0
        self.positions: dict[bytes, int] = {}
        self.announced: Counter[tuple[int | None, bytes | int]] = Counter()

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int = 8,
        priority: int = 0,
        cache_boundaries: Sequence[int] = (),
        options: RequestOptions = NO_OPTIONS,
    ) -> Request:
        """Queue a request."""
        self._next_id += 1
        request = make_request(
            f"r{self._next_id}",
            tokens,
            self.unit,
            max_tokens,
            priority=priority,
            cache_boundaries=cache_boundaries,
            options=options,
        )
        self._enqueue(request, len(self.waiting))
        self.manager.claim(request)
        return request

    def _enqueue(self, request: Request, index: int) -> None:
        if self.is_priority:
            insort(self.waiting, request, key=lambda r: (r.priority, int(r.request_id[1:])))
        else:
            self.waiting.insert(index, request)

    def _tag_tokens(self, request: Request) -> list[Tag]:
        for i, prefix_hash in enumerate(request.block_hashes):
            self.positions[prefix_hash] = (i + 1) * self.unit
        tags = self.tags.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        for i in range(len(tags), len(tokens)):
            previous = tags[-1] if tags else 0
            tags.append(hash((previous, tokens[i])))
        return tags

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away; it computes again later."""
        self.manager.free(request)
        self.memory.forget(request.request_id)
        self.running.remove(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request, 0)

    def _check_record(self, request: Request, found: Lookup | None, hit: int) -> None:
        """Every admission leaves a record: hits and reasons are the request's tokens, exactly."""
        record = self.manager.record_admission(request, found, hit)
        assert record.num_prompt_tokens == request.num_tokens
        assert record.num_cached_tokens == hit <= record.num_prompt_tokens - 1
        assert hit + sum(record.miss_tokens.values()) == record.num_prompt_tokens
        rebuild = found.hit.rebuild if found is not None and found.hit is not None else None
        assert record.miss_tokens.get("window_rebuilt", 0) == (
            rebuild.end - rebuild.start if rebuild is not None else 0
        )
        assert (record.rebuild_saved_tokens > 0) == (rebuild is not None)
        if rebuild is not None:
            assert rebuild.start == hit
            self.rebuilt[request.request_id] = rebuild.end
        self.records.setdefault(request.request_id, record)

    def finish(self, request: Request) -> None:
        """End a request."""
        self.manager.free(request)
        self.memory.forget(request.request_id)
        self.running.remove(request)
        self.finished[request.request_id] = list(request.all_token_ids)

    def _allocate(self, request: Request, num_new: int, scheduled: dict[str, int]) -> bool:
        while self.manager.allocate_slots(request, num_new) is None:
            victim = self.rng.choice(self.running)
            scheduled.pop(victim.request_id, None)
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def step(self, budget: int = 512) -> None:
        """Schedule, run and update once."""
        policy = self.coordinator.policy
        if self.rule is not None and isinstance(policy, AutoPolicy):
            policy.duel.rule = self.rule
        manager = self.manager
        self.memory.seal(self.positions)
        manager.new_step_starts()
        scheduled: dict[str, int] = {}
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            num_new = self._chunk(request, num_new)
            if num_new and self._allocate(request, num_new, scheduled):
                scheduled[request.request_id] = num_new
                budget -= num_new
        while self.waiting and budget > 0 and len(self.running) < 8:
            request = self.waiting[0]
            found: Lookup | None = manager.look_up(request)
            assert found is not None
            if self.waits and self.running and manager.should_wait(request, found):
                break
            hit = found.num_tokens
            num_new = min(request.num_tokens - hit, budget)
            admitted = manager.allocate_slots(
                request, num_new, hit, found.blocks, full_sequence_must_fit=True
            )
            if admitted is None and not self.running and hit:
                hit, found = 0, None
                num_new = min(request.num_tokens, budget)
                admitted = manager.allocate_slots(request, num_new, full_sequence_must_fit=True)
            if admitted is None:
                assert self.running, "nothing runs and nothing can be admitted: wedged"
                break
            request.num_computed_tokens = hit
            self.hits.setdefault(request.request_id, hit)
            self._check_record(request, found, hit)
            self.waiting.pop(0)
            self.running.append(request)
            scheduled[request.request_id] = num_new
            budget -= num_new
        may_preempt = not self.coordinator.geometry.shares_whole_blocks
        if self.rng.random() < 0.05 and scheduled and may_preempt:
            # A victim that was scheduled in this very step.
            request_id = self.rng.choice(sorted(scheduled))
            victim = next(r for r in self.running if r.request_id == request_id)
            del scheduled[request_id]
            self.preempt(victim)
        manager.coordinator.commit_step()
        work = manager.take_step_work()
        copies = work.copies
        self.num_steps += 1
        self.num_copies += len(copies)
        self.peak_pins = max(self.peak_pins, len(list(manager.block_pool.pins or ())))
        self.memory.copy(copies)
        self.memory.update_windows(work.window_tables)
        self.num_rebuilds += len(work.drafter_rebuilds)
        self._run(scheduled, work.row_bounds)
        self.check()

    def _chunk(self, request: Request, num_new: int) -> int:
        is_prefill = request.num_computed_tokens + num_new < request.num_tokens
        if is_prefill and self.rng.random() < 0.7:
            return self.manager.coordinator.chunk_end(request, num_new)
        if is_prefill and self.rng.random() < 0.5:
            return self.rng.randint(1, num_new)
        return num_new

    def _run(self, scheduled: dict[str, int], bounds: dict[str, RowBounds]) -> None:
        for request in list(self.running):
            num_new = scheduled.get(request.request_id)
            if num_new is None:
                continue
            start = request.num_computed_tokens
            end = start + num_new
            tags = self._tag_tokens(request)
            dense = self.manager.get_block_ids(request.request_id)
            own = bounds.get(request.request_id, _ALL_ROWS)
            assert not own.write_from or start < self.rebuilt[request.request_id]
            self.memory.run(request, tags, start, end, dense, own)
            request.num_computed_tokens = end
            if end == request.num_tokens:
                # The "model": a token that depends on the whole prefix, as greedy decoding does.
                request.append_output_token_ids(tags[-1] % 5)
                done = request.num_output_tokens >= request.max_tokens
                if done or request.num_tokens >= self.max_model_len:
                    self.finish(request)

    def check(self) -> None:
        """I1..I5, and I7: the events so far rebuild the index."""
        for event in self.manager.take_events():
            if isinstance(event, AllBlocksCleared):
                self.announced.clear()
            elif isinstance(event, BlockStored):
                self.announced.update((event.group_idx, h) for h in event.block_hashes)
                # A hash stands for as many tokens as its block holds; 0 are places to resume at.
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
            else:
                assert isinstance(event, BlockRemoved)
                self.announced.subtract((event.group_idx, h) for h in event.block_hashes)
        assert +self.announced == self._index_entries()
        assert not -self.announced, "something was removed more often than stored"
        computed = {r.request_id: r.num_computed_tokens for r in self.running}
        self.manager.check_invariants(computed)

    def _index_entries(self) -> Counter[tuple[int | None, bytes | int]]:
        index = self.coordinator.index
        entries: Counter[tuple[int | None, bytes | int]] = Counter()
        for block in self.manager.block_pool.blocks:
            for key in index.keys_of(block):
                group = next(g for g in index.keys if index.holds_key(g, key, block))
                entries[group, maybe_convert_block_hash(key)] += 1
        groups = [g.group_id for g in self.coordinator.geometry.windows]
        for record in index.checkpoints.values():
            for group_id, blocks in zip(groups, record.blocks, strict=True):
                if blocks:
                    entries[group_id, maybe_convert_block_hash(record.prefix_hash)] += 1
        return entries

    def run_all(self, max_steps: int = 10_000, budget: int = 512) -> None:
        """Step until everything has finished."""
        for _ in range(max_steps):
            if not self.waiting and not self.running:
                # The idle step that tells workers of the finished requests; copies have run.
                self.manager.new_step_starts()
                return
            self.step(budget)
        raise AssertionError("requests do not finish")
