"""Which blocks of a prompt a later request can use: what a store beside the pool should keep.

Pure functions over the geometry, under hits at one unit. Dense groups keep every block; window
groups only the tails below the boundaries that the retention policy keeps.
"""

from vllm.v1.core.retention import (
    CacheGeometry,
    GroupGeometry,
    RetentionPolicy,
    replay_boundaries,
)


def kept_boundaries(
    geometry: CacheGeometry, policy: RetentionPolicy, num_tokens: int, *, has_drafter: bool = False
) -> tuple[int, ...]:
    """Return the boundaries of a prompt where later requests resume, ascending.

    Where prompts and their parts end, and the policy's interval. A drafter's last row below P
    depends on the token at P, and a store keeps nothing to make it anew from. One that goes on
    with another token may have to resume one unit lower: the boundary below each is kept too, or
    siblings that differ behind a shared system prompt could never hit it.
    """
    wanted = set(
        replay_boundaries(
            geometry, num_tokens, keeps_lean=policy.keeps_lean, keeps_coarse=policy.keeps_coarse
        )
    )
    if policy.interval:
        wanted.update(range(policy.interval, num_tokens + 1, policy.interval))
    if has_drafter:
        wanted |= {boundary - geometry.unit for boundary in wanted}
    return tuple(sorted(boundary for boundary in wanted if boundary > 0))


def kept_block_mask(
    geometry: CacheGeometry,
    policy: RetentionPolicy,
    group: GroupGeometry,
    num_tokens: int,
    *,
    has_drafter: bool = False,
) -> list[bool]:
    """Return for each block of a prompt whether a later request can use it.

        prompt of 352 tokens, unit 32: boundaries 256 (lean) and 320; blocks 0 .. 10
        C4 (128)         ###
        window (32)      ....######.        with a drafter, 224 and 288 too: ...#######.
        C128 state (8)   only rows 256 .. 319

    Cost: the blocks of the prompt.
    """
    if not group.is_window:
        return [True] * group.num_dense_blocks(num_tokens)
    mask = [False] * len(group.block_range(0, num_tokens))
    for boundary in kept_boundaries(geometry, policy, num_tokens, has_drafter=has_drafter):
        for index in group.block_range(group.first_needed(boundary), boundary):
            mask[index] = True
    return mask
