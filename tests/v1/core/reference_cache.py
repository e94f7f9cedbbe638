"""The whole-block prefix cache once more, in plain lists and loops: an oracle for random traffic.

Written from the rules, for full attention and sliding windows, without a thought for speed: every
lookup scans, every queue is a list of ids, a group's cache key is (group, hash).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

NULL = 0
Key = tuple[int, bytes]


@dataclass(frozen=True)
class Group:
    """A KV cache group; ``window`` 0: full attention."""

    block_size: int
    window: int = 0
    is_eagle: bool = False

    @property
    def spec(self) -> tuple[int, int]:
        """What groups must have in common to be looked up together."""
        return self.block_size, self.window

    def num_skipped_blocks(self, num_computed: int) -> int:
        """Blocks below the window of the next token."""
        if not self.window:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size

    def num_tail_blocks(self) -> int:
        """Blocks below a boundary that a hit needs."""
        return -(-(self.window - 1) // self.block_size) + self.is_eagle


@dataclass
class Table:
    """A request's blocks of one group; ``num_done``: judged by caching, None before admission."""

    blocks: list[int] = field(default_factory=list)
    num_done: int | None = None


class ReferenceCache:
    """Blocks, tables and hits of some groups over one pool."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[Group],
        *,
        alignment: int,
        hash_block: int,
        interval: int | None,
    ) -> None:
        # Groups of one spec are looked up together, so all cache what a drafter among them needs.
        eagle_specs = {group.spec for group in groups if group.is_eagle}
        self.groups = [Group(*group.spec, group.spec in eagle_specs) for group in groups]
        self.alignment = alignment
        self.hash_block = hash_block
        self.interval = interval
        self.free = list(range(1, num_blocks))
        self.ref_cnt = [0] * num_blocks
        self.key_of: list[Key | None] = [None] * num_blocks
        self.cached: dict[Key, list[int]] = {}
        self.tables: dict[str, list[Table]] = {}

    # ---- blocks ------------------------------------------------------------------------------

    def take(self, num_blocks: int) -> list[int]:
        """Take the first free blocks, forgetting what was cached in them."""
        taken = [self.free.pop(0) for _ in range(num_blocks)]
        for block in taken:
            key, self.key_of[block] = self.key_of[block], None
            if key is not None:
                self.cached[key].remove(block)
                if not self.cached[key]:
                    del self.cached[key]
            self.ref_cnt[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int], *, to_front: bool = False) -> None:
        """Let go of blocks; those nobody holds become free, in this order."""
        freed = []
        for block in blocks:
            if block == NULL:
                continue
            self.ref_cnt[block] -= 1
            if self.ref_cnt[block] == 0:
                freed.append(block)
        self.free = freed + self.free if to_front else self.free + freed

    def give_back_split(self, blocks: Sequence[int]) -> None:
        """Cached blocks to the back, the others to the front."""
        held = [block for block in blocks if block != NULL]
        self.give_back([b for b in held if self.key_of[b] is not None])
        self.give_back([b for b in held if self.key_of[b] is None], to_front=True)

    def touch(self, block: int) -> None:
        """Hold a cached block."""
        if block == NULL:
            return
        if self.ref_cnt[block] == 0:
            self.free.remove(block)
        self.ref_cnt[block] += 1

    # ---- keys --------------------------------------------------------------------------------

    def key(self, hashes: Sequence[bytes], group_id: int, index: int) -> Key | None:
        """A block's key; None if its tokens are not all hashed."""
        per = self.groups[group_id].block_size // self.hash_block
        if (index + 1) * per > len(hashes):
            return None
        return group_id, b"".join(hashes[index * per : (index + 1) * per])

    def row(self, hashes: Sequence[bytes], group_ids: Sequence[int], index: int) -> list[int]:
        """A cached block for every group; empty unless all have one."""
        blocks = []
        for group_id in group_ids:
            key = self.key(hashes, group_id, index)
            if key is None or key not in self.cached:
                return []
            blocks.append(self.cached[key][0])
        return blocks

    def is_kept(self, group: Group, index: int, num_prompt: int) -> bool:
        """Whether a later request can hit a block."""
        if not group.window:
            return True
        need, shift = group.num_tail_blocks(), int(group.is_eagle)
        segment = self.alignment if self.interval is None else self.interval
        per = segment // group.block_size
        if per and (need >= per or (index >= shift and (index - shift) % per >= per - need)):
            return True
        if self.interval is None:
            return False
        replay = (num_prompt - 1) // self.alignment * self.alignment
        end = replay // group.block_size + shift
        return end - need <= index < end

    # ---- lookup ------------------------------------------------------------------------------

    def find_full(
        self, hashes: Sequence[bytes], group_ids: Sequence[int], length: int, alignment: int
    ) -> list[list[int]]:
        """Left to right until a miss."""
        group = self.groups[group_ids[0]]
        rows: list[list[int]] = []
        for index in range(length // group.block_size):
            row = self.row(hashes, group_ids, index)
            if not row:
                break
            rows.append(row)
        if group.is_eagle:
            del rows[-1:]
        while len(rows) * group.block_size % alignment:
            rows.pop()
        return rows

    def find_window(
        self, hashes: Sequence[bytes], group_ids: Sequence[int], length: int, alignment: int
    ) -> list[list[int]]:
        """Right to left until a run as long as the window."""
        group = self.groups[group_ids[0]]
        size, need = group.block_size, group.num_tail_blocks()
        rows = [[NULL] * len(group_ids) for _ in range(length // size)]
        run = 0
        for index in reversed(range(len(rows))):
            row = self.row(hashes, group_ids, index)
            if not row:
                run = 0
                continue
            if run == 0 and (index + 1 - group.is_eagle) * size % alignment:
                continue
            rows[index] = row
            run += 1
            if run >= need:
                blank = [[NULL] * len(group_ids) for _ in range(index)]
                rows = blank + rows[index : index + run]
                break
        else:
            # The run that touches block 0 counts, although it is shorter.
            del rows[run:]
            while len(rows) * size % alignment:
                rows.pop()
        if group.is_eagle:
            del rows[-1:]
        while len(rows) * size % alignment:
            rows.pop()
        return rows

    def find(self, hashes: Sequence[bytes], length: int) -> tuple[list[list[int]], int]:
        """The blocks of the longest common hit by group, and its tokens."""
        by_spec: dict[tuple[int, int], list[int]] = {}
        for group_id, group in enumerate(self.groups):
            by_spec.setdefault(group.spec, []).append(group_id)
        alignment = self.alignment
        cap = length
        found: dict[tuple[int, int], list[list[int]]] = {}
        while True:
            before = length
            for spec in sorted(by_spec, key=lambda spec: spec[1] > 0):
                group_ids = by_spec[spec]
                group = self.groups[group_ids[0]]
                if spec in found and (not group.window or len(found[spec]) * spec[0] == length):
                    continue
                # What a drafter drops lies beyond the candidate.
                reach = length
                if group.is_eagle and len(by_spec) > 1:
                    reach = min(length + group.block_size, cap)
                find = self.find_window if group.window else self.find_full
                found[spec] = find(hashes, group_ids, reach, alignment)
                length = len(found[spec]) * group.block_size
                if length == 0:
                    return [[] for _ in self.groups], 0
            if length == before and len(found) == len(by_spec):
                break
        hit: list[list[int]] = [[] for _ in self.groups]
        for spec, group_ids in by_spec.items():
            for i, group_id in enumerate(group_ids):
                hit[group_id] = [row[i] for row in found[spec][: length // spec[0]]]
        return hit, length

    # ---- requests ----------------------------------------------------------------------------

    def num_needed(
        self, request_id: str, num_slots: int, hit: Sequence[Sequence[int]], num_computed: int
    ) -> int:
        """Blocks that leave the free queue."""
        total = 0
        tables = self.tables.get(request_id, [Table() for _ in self.groups])
        for group, table, blocks in zip(self.groups, tables, hit, strict=True):
            required, held = -(-num_slots // group.block_size), len(table.blocks)
            if table.num_done is not None:
                total += max(required - held, 0)
                continue
            skipped = group.num_skipped_blocks(num_computed)
            total += max(required - max(skipped, held + len(blocks)), 0)
            in_window = blocks[max(skipped - held, 0) :]
            total += sum(1 for b in in_window if b != NULL and self.ref_cnt[b] == 0)
        return total

    def allocate(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        num_computed: int,
        num_new: int,
        num_tokens: int,
        num_prompt: int,
        hit: Sequence[Sequence[int]] | None = None,
        num_external: int = 0,
        num_lookahead: int = 0,
        num_reserved: int = 0,
        delay_cache: bool = False,
    ) -> list[list[int]] | None:
        """Take a step's blocks by group; None if there are too few.

        Args:
            num_computed: Tokens computed before the step, a hit's included.
            num_external: Tokens behind those which a connector loads.
        """
        num_computed += num_external
        tables = self.tables.get(request_id)
        for group, table in zip(self.groups, tables or (), strict=False):
            self.remove_skipped(group, table, num_computed)
        adopted = [[] for _ in self.groups] if hit is None else hit
        num_slots = num_computed + num_new + num_lookahead
        if self.num_needed(request_id, num_slots, adopted, num_computed) > (
            len(self.free) - num_reserved
        ):
            return None
        if tables is None:
            tables = self.tables[request_id] = [Table() for _ in self.groups]
        if any(adopted) or num_external:
            for group, table, blocks in zip(self.groups, tables, adopted, strict=True):
                skipped = group.num_skipped_blocks(num_computed)
                for block in blocks[skipped:]:
                    self.touch(block)
                table.blocks = [NULL] * skipped + list(blocks[skipped:])
                table.num_done = len(table.blocks)
        if num_external:
            for group, table in zip(self.groups, tables, strict=True):
                missing = -(-num_computed // group.block_size) - len(table.blocks)
                table.blocks += self.take(max(missing, 0))
        new_blocks = []
        for group, table in zip(self.groups, tables, strict=True):
            missing = -(-num_slots // group.block_size) - len(table.blocks)
            new_blocks.append(self.take(max(missing, 0)))
            table.blocks += new_blocks[-1]
        if not delay_cache:
            self.cache(request_id, hashes, min(num_computed + num_new, num_tokens), num_prompt)
        return new_blocks

    def remove_skipped(self, group: Group, table: Table, num_computed: int) -> None:
        """Put the null block for those below the window, right to left until the first null."""
        removed = []
        for index in reversed(
            range(min(group.num_skipped_blocks(num_computed), len(table.blocks)))
        ):
            if table.blocks[index] == NULL:
                break
            removed.append(table.blocks[index])
            table.blocks[index] = NULL
        self.give_back_split(removed)

    def cache(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, num_prompt: int
    ) -> None:
        """Enter full blocks; several groups only up to the last boundary."""
        is_hybrid = len(self.groups) > 1
        aligned = num_tokens // self.alignment * self.alignment
        if is_hybrid and aligned == 0:
            return
        tables = self.tables[request_id]
        for group_id, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            end = num_tokens
            if is_hybrid:
                end = min(num_tokens, aligned + group.block_size) if group.is_eagle else aligned
            num_full, num_done = end // group.block_size, table.num_done or 0
            if num_full <= num_done:
                continue
            for index in range(num_done, num_full):
                block = table.blocks[index]
                if block != NULL and self.is_kept(group, index, num_prompt):
                    key = self.key(hashes, group_id, index)
                    assert key is not None
                    self.key_of[block] = key
                    self.cached.setdefault(key, []).append(block)
            table.num_done = num_full

    def free_request(self, request_id: str) -> None:
        """Give all of a request's blocks back, its tail first."""
        for group, table in zip(self.groups, self.tables.pop(request_id, ()), strict=False):
            blocks = table.blocks[::-1]
            if group.window:
                self.give_back_split(blocks)
            else:
                self.give_back(blocks)
