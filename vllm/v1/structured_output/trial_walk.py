"""Walks through a grammar at random, so that a library that hangs in it does so in the child.

The library takes all bytes at once that nothing else may stand for. A lexeme takes as much text as
it can, so in ``("x" | "y") /a+/ "a"`` every "a" belongs to ``/a+/``, and behind "x" one more is
always the only way on: there is no end to them. Nothing of that shows before the first choice.
"""

import json
import random
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Seconds of processor time, walks and tokens of each: what most grammars are done with sooner.
_WALK_S, _NUM_WALKS, _NUM_TOKENS = 0.25, 24, 16
# A walk that takes so much longer is at one step without end.
WALK_CPU_S = 1.0
_UNBOUNDED = re.compile(r"[+*]|\{\d+,\}")
_TEXTS = {"regex": "pattern", "grammar": "grammar"}


def may_run_on(params: StructuredOutputsParams) -> bool:
    """Whether a grammar joins lexemes of which one may have any length, as its author wrote it."""
    if params.grammar is not None:
        return _UNBOUNDED.search(params.grammar) is not None
    if params.structural_tag is None:
        return False
    waiting: list[Any] = [json.loads(params.structural_tag)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            text = item.get(_TEXTS.get(str(item.get("type")), ""))
            if isinstance(text, str) and _UNBOUNDED.search(text):
                return True
            waiting += item.values()
    return False


def walk(matcher: "LLMatcher", vocab_size: int) -> None:
    """Go through a grammar's choices, from its beginning; the process may not survive it.

    Args:
        matcher: At its beginning; it is copied.
        vocab_size: V.
    """
    rng, end = random.Random(0), time.process_time() + _WALK_S
    for _ in range(_NUM_WALKS):
        ahead = matcher.deep_copy()
        for _ in range(_NUM_TOKENS):
            if time.process_time() > end:
                return
            token_ids = ahead.compute_ff_tokens()
            if not token_ids:
                mask = np.frombuffer(ahead.compute_bitmask(), np.uint8)
                bits = np.unpackbits(mask, count=vocab_size, bitorder="little")
                allowed = np.flatnonzero(bits)
                if not len(allowed):
                    break
                token_ids = [int(rng.choice(allowed))]
            if not ahead.consume_tokens(token_ids) or ahead.is_stopped():
                break
