"""Which blocks of a sliding-window group a later request can hit (``hit_unit`` None).

Pure functions over ints. A hit of a hybrid model ends on a boundary, a multiple of the scheduler's
block size, and needs the window's tail below it: ``need = ceil((window - 1) / block_size)`` blocks.
Everything between two tails can never serve a hit, so it is not hashed and is reused first.
"""

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv


def resolve_retention_interval(
    value: int | str | None, *, has_window_groups: bool, scheduler_block_size: int
) -> int | None:
    """Return the tokens between kept boundaries; None keeps all of them, 0 the replay boundary.

    "auto" is 0: a tail at every boundary flushes other prompts (docs/prefix_cache.md). Without a
    window group nothing is ever dropped: "auto" has nothing to choose, and a number is a mistake.

    Args:
        value: None or "none", "auto", or a number of tokens.
        has_window_groups: Whether the model has a sliding-window KV cache group.
        scheduler_block_size: Tokens on whose multiples a hit ends.

    Raises:
        ConfigError: (a ValueError) The value is none of those, or does not fit the model.
    """
    text = "none" if value is None else str(value).strip().lower()
    if text == "none":
        return None
    name = f"Prefix-cache retention interval {value} (VLLM_PREFIX_CACHE_RETENTION_INTERVAL)"
    try:
        interval = 0 if text == "auto" else int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} is not valid: use none, auto, 0 or a number of tokens."
        ) from error
    if not has_window_groups:
        if text == "auto":
            return None
        raise ConfigError(
            f"{name} has nothing to act on: the model has no sliding-window KV cache group (no "
            "SlidingWindowSpec). Unset it, or use none or auto."
        )
    if interval < 0 or interval % scheduler_block_size:
        raise ConfigError(
            f"{name} must be non-negative and a multiple of scheduler_block_size "
            f"({scheduler_block_size}): use 0, {scheduler_block_size}, "
            f"{2 * scheduler_block_size}, ..., none or auto."
        )
    return interval


def pinned_tail(
    boundary: int, num_tokens: int, *, block_size: int, window: int, use_eagle: bool
) -> tuple[int, int]:
    """Return the blocks [first, end) that a hit at a boundary looks up.

        block 8, window 20 (need 3), boundary 64, 70 tokens computed, blocks 0..8
        token     0   32  64..70
                  .....###.         resume at 64: tokens 45..63, blocks 5 6 7

    Args:
        boundary: Where the hit ends, a multiple of ``block_size``.
        num_tokens: Tokens computed, at least that; what is not full yet is left out. That is the
            block which a drafter's hit drops, until ``boundary + block_size`` tokens are computed.
        block_size: Tokens of a block.
        window: Tokens a token attends to, itself included.
        use_eagle: Whether the group serves a drafter.
    """
    if boundary == 0:
        return 0, 0
    end = min(boundary // block_size + use_eagle, num_tokens // block_size)
    return max(end - num_window_tail_blocks(window, block_size, use_eagle), 0), end


def num_window_tail_blocks(window: int, block_size: int, drop_eagle_block: bool) -> int:
    """Return how many blocks in a row a hit needs below its end.

    Args:
        window: Tokens a token attends to, itself included.
        block_size: Tokens of a block.
        drop_eagle_block: Whether the last matched block is dropped again, to be recomputed for
            the drafter: then one more must match.
    """
    return cdiv(window - 1, block_size) + drop_eagle_block


def sliding_window_block_mask(
    start_block: int,
    end_block: int,
    *,
    block_size: int,
    window: int,
    alignment_tokens: int | None,
    use_eagle: bool,
    retention_interval: int | None = None,
    num_prompt_tokens: int | None = None,
) -> list[bool] | None:
    """Keep a block iff it lies in the tail below a boundary worth keeping.

    Boundaries worth keeping are every multiple of the segment (the alignment without an interval,
    none for interval 0, else the interval), and with an interval the replay boundary too: the last
    alignment below the prompt's last token, where an identical prompt resumes. With a drafter a
    tail reaches one block past its boundary, because a hit drops the last block it matched.

        block 8, window 8 (need 1), alignment 32, prompt of 128 tokens, blocks 0..15
        token     0   32  64  96  128
        unset     ...#...#...#...#    every boundary: 3 7 11 15
        64        .......#...#...#    64, the replay boundary 96, 128: 7 11 15
        0         ...........#....    the replay boundary only: 11
        drafter   ...##..##..##..#    need 2, one block beyond: 3 4, 7 8, 11 12, 15 (16)

    Costs O(end_block - start_block).

    Args:
        alignment_tokens: Hits end on multiples of it; None: anywhere.
        retention_interval: Tokens between kept boundaries, a multiple of the alignment; None
            keeps all, 0 none but the replay boundary.

    Returns:
        One flag per block, or None when every block is kept.
    """
    if alignment_tokens is None:
        return None
    assert alignment_tokens % block_size == 0
    need = num_window_tail_blocks(window, block_size, use_eagle)
    shift = int(use_eagle)
    num_blocks = max(end_block - start_block, 0)
    mask = [False] * num_blocks
    segment_tokens = alignment_tokens if retention_interval is None else retention_interval
    if segment_tokens > 0:
        per_segment = segment_tokens // block_size
        if need >= per_segment:
            return None
        # Slices, not a loop over blocks: every chunk of every window group asks for a mask.
        segment = [False] * (per_segment - need) + [True] * need
        phase = (start_block - shift) % per_segment
        mask = (segment * (num_blocks // per_segment + 2))[phase : phase + num_blocks]
        # The tail of boundary 0, which nobody resumes at, reaches into the first blocks.
        for block in range(start_block, min(shift, end_block)):
            mask[block - start_block] = False
    if retention_interval is not None and num_prompt_tokens is not None:
        replay_tokens = (num_prompt_tokens - 1) // alignment_tokens * alignment_tokens
        tail_end = replay_tokens // block_size + shift
        for block in range(max(start_block, tail_end - need), min(end_block, tail_end)):
            mask[block - start_block] = True
    return mask
