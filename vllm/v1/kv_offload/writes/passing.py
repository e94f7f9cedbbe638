"""What a prompt that comes by tells a tier of its objects: which are used, which will not be.

    tokens    0 ........ G ........ 2G ........ 3G .... P ........ Q
    turn 2    |  rows    |   rows    |   rows    | .. s1                    s1 is left
    turn 3    |<------ hit: used, all at one time ------>|........ s2       s2 is left
    turn 4    |<------ hit: used ---------------------------------->|       s1 goes first now

A state serves those who go on from it. A conversation goes on from its last one, or again from the
one before, if its last turn is said anew; behind that a state is wanted only where several prompts
have gone on.
"""

from __future__ import annotations

from vllm.v1.kv_offload.layout import ObjectLayout
from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.object_store import ObjectStore
from vllm.v1.kv_offload.store.records import ObjectKey
from vllm.v1.kv_offload.writes.tracking import Passage

# Boundaries below a hit at which states are looked for: what lies deeper was passed by before.
_MAX_LOOKED_AT = 512


def note_passage(store: ObjectStore, layout: ObjectLayout, passage: Passage) -> None:
    """Tell a store of a prompt; memory only."""
    hashes, unit, size = passage.block_hashes, layout.unit, layout.group_tokens
    end = min(passage.end // unit, len(hashes)) * unit
    keys = [
        ObjectKey.of(ObjectKind.ROWS, hashes[position // unit - 1])
        for position in range(size, end + 1, size)
    ]
    if passage.is_hit and end:
        keys.append(ObjectKey.of(ObjectKind.STATE, hashes[end // unit - 1]))
    if keys:
        store.use(keys, is_hit=passage.is_hit)
    if passage.is_hit:
        last = end // unit - 1
        store.pass_by(
            [
                ObjectKey.of(ObjectKind.STATE, hashes[i - 1])
                for i in range(last, max(0, last - _MAX_LOOKED_AT), -1)
            ]
        )
