"""Prefixes that a connector loads by itself, beside those that a request waits for.

begin    a stand-in takes blocks for the prefix     nothing of it can be hit yet
         ... rows come, beside the steps ...
settle   it is one more cached prefix, or nothing   the stand-in lets go of its blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.pool.exports import PrefixBlocks
    from vllm.v1.core.values.cache_step import Lookup


def stand_in(
    name: str, hashes: Sequence[bytes], unit: int, ttls: dict[int, float] | None = None
) -> Request:
    """Return a request whose prompt is a prefix and one token more; no token of it is ever read.

    Args:
        name: Of the load.
        hashes: Of the prefix, one for each unit.
        unit: Tokens under one hash.
        ttls: How long, in seconds, to keep the prefix that ends behind so many tokens.
    """
    return Request(
        name,
        [0] * (len(hashes) * unit + 1),
        SamplingParams(max_tokens=1),
        block_hashes=list(hashes),  # type: ignore[arg-type]
        cache_ttls=ttls,
    )


@dataclass(frozen=True, slots=True)
class _Running:
    request: Request
    num_tokens: int
    is_rows_alone: bool


class OwnLoads:
    """Loads that are nobody's.

    Owns: the stand-ins of the loads that run, with their blocks.

    Args:
        manager: The pool's.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._running: dict[str, _Running] = {}

    def is_loading(self, name: str) -> bool:
        """Whether a load is one of these, and runs."""
        return name in self._running

    def begin(
        self,
        request: Request,
        local: Lookup,
        num_tokens: int,
        next_token: int | None = None,
        *,
        is_rows_alone: bool = False,
    ) -> PrefixBlocks | None:
        """Take the blocks of a prefix that is going to be loaded.

        Args:
            request: A stand-in whose prompt begins with the prefix.
            local: What is cached of it already.
            num_tokens: Of the prefix, more than are cached.
            next_token: The token that followed where the rows were made; None: the request's own.
            is_rows_alone: Whether no state comes: windows are rebuilt above the rows.

        Returns:
            Where to write the rest of it; None: the pool has no room.
        """
        manager, num_external = self._manager, num_tokens - local.num_tokens
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
        self._running[request.request_id] = _Running(request, num_tokens, is_rows_alone)
        return manager.coordinator.find_import(request, num_tokens, num_external, next_token)

    def settle(self, name: str, *, has_failed: bool) -> int | None:
        """Take note that a load ended: what came can be hit from now on.

        Returns:
            The tokens that came, 0 if it failed; None: it is not one of these.
        """
        running = self._running.pop(name, None)
        if running is None:
            return None
        request, num_tokens = running.request, running.num_tokens
        if not has_failed and running.is_rows_alone:
            self._manager.cache_rows(request, num_tokens)
        elif not has_failed:
            request.resume_at(num_tokens)
            self._manager.cache_blocks(request, num_tokens)
        self._manager.free(request)
        return 0 if has_failed else num_tokens
