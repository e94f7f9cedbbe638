"""Kept prefixes of several engine cores as one: what an operator keeps, every core keeps."""

import re
from collections.abc import Sequence

import msgspec

from vllm.entrypoints.openai.engine_stream import EngineClient
from vllm.v1.engine.questions import AskHeld
from vllm.v1.messages import HeldPrefix

# What ``POST /v1/cache/prefixes`` calls a prefix, and what the cores add to tell theirs apart.
_NAME = re.compile(r"(prefix-[0-9a-f]{16})-.*")


def merge_held(prefixes: Sequence[HeldPrefix]) -> list[HeldPrefix]:
    """Return one entry for what several cores keep of one request, the oldest first.

    Blocks and hits are those of all; tokens and the end of the pin, what holds for all.
    """
    merged: dict[str, HeldPrefix] = {}
    for held in prefixes:
        name = _name_of(held.id)
        known = merged.get(name)
        merged[name] = held if known is None else _join(name, known, held)
    return list(merged.values())


def _name_of(held_id: str) -> str:
    found = _NAME.fullmatch(held_id)
    return held_id if found is None else found[1]


def _join(name: str, one: HeldPrefix, other: HeldPrefix) -> HeldPrefix:
    ends = [e for e in (one.expires_in, other.expires_in) if e is not None]
    return msgspec.structs.replace(
        one,
        id=name,
        num_tokens=min(one.num_tokens, other.num_tokens),
        num_blocks=one.num_blocks + other.num_blocks,
        is_pinned=one.is_pinned and other.is_pinned,
        expires_in=min(ends, default=None),
        num_hits=one.num_hits + other.num_hits,
    )


async def forget_held(engine: EngineClient, prefix_id: str) -> bool:
    """Let go of a kept prefix wherever it is; return whether it was anywhere."""
    reply = await engine.ask(AskHeld(prefix_id))
    was_there = reply.forgotten
    for held in reply.prefixes:
        if held.id != prefix_id and _name_of(held.id) == prefix_id:
            was_there |= (await engine.ask(AskHeld(held.id))).forgotten
    return was_there
