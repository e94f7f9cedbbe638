"""Whole rows of the KV pool, moved in plain torch."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.utils.uploads import upload

# A copy materialises its sources before it writes; wide pools are copied in column tiles so that
# this scratch stays below the bound.
_COPY_SCRATCH_BYTES = 256 << 20


def copy_blocks(
    pools: Sequence[torch.Tensor],
    pairs: Sequence[tuple[int, int]],
    scratch_bytes: int = _COPY_SCRATCH_BYTES,
) -> None:
    """Copy whole pool rows, all pairs at once.

    A simultaneous assignment: every source is read before any destination is written, so pairs may
    form chains (1 -> 2, 2 -> 3) and cycles.

    Args:
        pools: uint8 ``[num_blocks, stride]`` each.
        pairs: (source, destination) block ids; no destination twice, no null block.
        scratch_bytes: Bound on the memory that holds sources.

    Mutates: the destination rows of every pool.
    """
    if not pairs:
        return
    assert min(map(min, pairs)) > 0, f"block copies {pairs} touch the null block 0"
    assert len({dst for _, dst in pairs}) == len(pairs), f"block copies {pairs} write one twice"
    ids = np.array(pairs, dtype=np.int64)
    for pool in pools:
        sources, destinations = upload(ids, pool.device).unbind(1)
        tile = max(64, scratch_bytes // len(pairs))
        # Column tiles keep the assignment simultaneous; tiles of pairs would not.
        for begin in range(0, pool.shape[1], tile):
            columns = pool[:, begin : begin + tile]
            columns.index_copy_(0, destinations, columns.index_select(0, sources))


def zero_blocks(pools: Sequence[torch.Tensor], block_ids: Sequence[int]) -> None:
    """Fill whole pool rows with zeros.

    Args:
        pools: uint8 ``[num_blocks, stride]`` each.
        block_ids: Rows, without the null block.

    Mutates: the named rows of every pool.
    """
    if not block_ids:
        return
    assert min(block_ids) > 0, f"zeroing {block_ids} would touch the null block 0"
    ids = np.array(block_ids, dtype=np.int64)
    for pool in pools:
        pool.index_fill_(0, upload(ids, pool.device), 0)
