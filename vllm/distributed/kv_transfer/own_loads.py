"""Blocks for prefixes that a connector loads by itself, beside those that a request waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.pool.exports import PrefixBlocks
    from vllm.v1.core.values.cache_step import Lookup
    from vllm.v1.request import Request


def allocate_load(
    manager: KVCacheManager,
    request: Request,
    local: Lookup,
    num_tokens: int,
    next_token: int | None = None,
) -> PrefixBlocks | None:
    """Take the blocks of a prefix that is going to be loaded; nothing of it can be hit yet.

    Args:
        manager: The pool's.
        request: A stand-in whose prompt begins with the prefix.
        local: What is cached of it already.
        num_tokens: Of the prefix, more than are cached.
        next_token: The token that followed where the rows were made; None: the request's own.

    Returns:
        Where to write the rest of it; None: the pool has no room.
    """
    num_external = num_tokens - local.num_tokens
    taken = manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=local.num_tokens,
        new_computed_blocks=local.blocks,
        num_external_computed_tokens=num_external,
        delay_cache_blocks=True,
    )
    if taken is None:
        return None
    return manager.find_import(request, num_tokens, num_external, next_token)
