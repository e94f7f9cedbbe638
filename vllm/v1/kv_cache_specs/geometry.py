"""What a request needs of one KV cache group to resume at a boundary: ints, answered by its spec.

Words: the *unit* u is the number of tokens under one prefix hash. A *boundary* P is a multiple of u
where a request can resume. *Dense* groups keep every row; *window* groups need only the rows
``[first_needed(P), P)``, which a *checkpoint* of P holds.

    tokens     0 ........................ P-128 ............ P-4 . P
    dense      rows of every token below P, one per `ratio` tokens
    window     .......................... |<-- P-127 .. P-1 ------>|    align 1,   keep 127
    C4 state   ......................................... |P-4..P-1|     align 4,   keep 4
    C128 state rows floor(P/128)*128 .. P-1: none when 128 divides P    align 128, keep 0
    recurrent  no rows: the blocks of the span that ends at or above P  align u,   is_recurrent
               hold one state, that after token P-1
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One KV cache group, as the policy sees it.

    Attributes:
        group_id: Index in ``KVCacheConfig.kv_cache_groups``.
        is_window: Whether only a checkpoint's blocks are needed below a boundary.
        block_size: Tokens of a block.
        ratio: Dense groups: tokens per stored row. Window groups: 1.
        align: Window groups: the needed tail begins at a multiple of this, less ``keep``.
        keep: Window groups: rows needed below the aligned position.
        extra: Window groups: rows that are kept below those: what a coordinator chose to keep.
        has_drafter_rows: Whether rows of a drafter are in it, made with the token after theirs.
        is_recurrent: Window groups: whether the blocks of ``align`` tokens hold no rows but one
            state, which stands for all tokens before the last one computed in them. A step reads
            the state where it starts and writes it where it ends and at every boundary whose
            blocks it was given; so what it reads and what it writes are the same blocks only
            within ``align`` tokens, and a published state is never written again.
        num_pieces: Blocks that hold what ``block_size`` tokens leave: a large state is cut. Block
            indices count them all: those of tokens ``[i, i + 1) * block_size`` begin at
            ``i * num_pieces``.
        lazy_reach: Window groups: above 0, their layers may leave out rows that come so many tokens
            before the first output that is read: a checkpoint further back may lack theirs.
    """

    group_id: int
    is_window: bool
    block_size: int
    ratio: int = 1
    align: int = 1
    keep: int = 0
    has_drafter_rows: bool = False
    is_recurrent: bool = False
    extra: int = 0
    num_pieces: int = 1
    lazy_reach: int = 0

    def first_read(self, position: int) -> int:
        """Return the first row that computing the token at ``position`` reads.

        Window groups: ``floor(position / align) * align - keep``, at least 0; equal to
        ``position`` when nothing is needed. A recurrent group needs the whole span that the token
        before ``position`` is in. Dense groups need everything: 0.
        """
        if not self.is_window:
            return 0
        return max(0, (position - self.is_recurrent) // self.align * self.align - self.keep)

    def first_needed(self, position: int) -> int:
        """Return the first row that is held for a request that goes on at ``position``."""
        if not self.is_window:
            return 0
        # ``first_read`` in place: every step asks this of every group several times.
        first = (position - self.is_recurrent) // self.align * self.align - self.keep - self.extra
        return first if first > 0 else 0

    def num_dense_blocks(self, num_tokens: int) -> int:
        """Return the blocks that hold the rows of ``num_tokens`` tokens in a dense group.

        A row exists once its ``ratio`` tokens do, so a short context may need no block at all.
        """
        return -(-(num_tokens // self.ratio * self.ratio) // self.block_size)

    def block_range(self, first_row: int, end_row: int) -> range:
        """Return the block indices that cover rows ``[first_row, end_row)``.

        A state has all its blocks or none.
        """
        if end_row <= first_row:
            return range(0)
        if self.is_recurrent:
            first_row = first_row // self.align * self.align
            end_row = cdiv(end_row, self.align) * self.align
        size, num_pieces = self.block_size, self.num_pieces
        return range(first_row // size * num_pieces, -(-end_row // size) * num_pieces)

    def first_block(self, row: int) -> int:
        """Return the index of the first block that holds a row."""
        return row // self.block_size * self.num_pieces

    def first_blocks(self, rows: Iterable[int]) -> list[int]:
        """Return ``first_block`` of many rows."""
        size, num_pieces = self.block_size, self.num_pieces
        return [row // size * num_pieces for row in rows]

    def rows_below(self, position: int) -> range:
        """Return the block indices that a request needs to go on at ``position``."""
        return self.block_range(self.first_needed(position), position)


def check_block_size(group_id: int, block_size: int, unit: int, *, is_window: bool) -> None:
    """Refuse blocks in which a prefix cannot end at every unit.

    Args:
        group_id: Of the group.
        block_size: Tokens of its blocks.
        unit: Tokens under one prefix hash.
        is_window: Whether its checkpoints hold whole blocks.

    Raises:
        ConfigError: The block size is neither a divisor nor a multiple of the unit, or no divisor
            in a window group.
    """
    if unit % block_size and block_size % unit:
        raise ConfigError(
            f"KV cache group {group_id} has blocks of {block_size} tokens, which neither divide "
            f"the unit of {unit} tokens nor are a multiple of it: choose another --block-size."
        )
    if is_window and unit % block_size:
        raise ConfigError(
            f"KV cache group {group_id} has window blocks of {block_size} tokens, which do not "
            f"divide the unit of {unit} tokens: a checkpoint must end on a block's end."
        )
