"""Prompts as a learner sees them: a sample of their spans, few enough to follow in plain Python."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.utils.hashing import BlockHash

SPAN_TOKENS = 512
# Spans that a learner follows at most; a larger pool is sampled.
MAX_SPANS = 16_384
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def is_sampled(key: int, rate: int) -> bool:
    """Whether a key is one of about every ``rate``; who asks again is told the same."""
    return ((key * _MIX & _MASK) >> 32) % rate == 0


class Span(NamedTuple):
    """A piece of a prompt, known by all tokens up to its end.

    Attributes:
        key: Stands for the prefix that ends with it.
        end: Tokens of that prefix.
    """

    key: int
    end: int


class SpanSampler:
    """Cuts prompts into spans and leaves out all but one in ``rate`` of them.

    Whether a span is followed depends on its prefix alone, so every prompt that holds it agrees. A
    cache of C spans is then like one of C / rate in which only those stand.

        prompt     |--512--|--512--|--512--|--512--| rest
        sampled        .       x       .       x        rate 2, by hash

    Args:
        unit: Tokens under one prefix hash.
        capacity_tokens: Tokens of dense rows that the pool holds.
    """

    __slots__ = ("_per_span", "_tokens", "capacity", "rate")

    def __init__(self, unit: int, capacity_tokens: int) -> None:
        self._per_span = max(1, SPAN_TOKENS // unit)
        self._tokens = self._per_span * unit
        spans = max(1, capacity_tokens // self._tokens)
        self.rate = -(-spans // MAX_SPANS)
        self.capacity = max(1, spans // self.rate)

    @property
    def tokens_per_span(self) -> int:
        """Tokens that a followed span stands for."""
        return self._tokens * self.rate

    def sample(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> list[Span]:
        """Return the followed spans of a prompt, in order.

        Args:
            block_hashes: Chained hashes, one per unit.
            num_tokens: Tokens of the prompt; a last, partial span is left out.
        """
        num_spans = min(num_tokens // self._tokens, len(block_hashes) // self._per_span)
        spans = []
        for number in range(1, num_spans + 1):
            prefix_hash = block_hashes[number * self._per_span - 1]
            key = int.from_bytes(prefix_hash[:8], "little")
            if self.rate == 1 or is_sampled(key, self.rate):
                spans.append(Span(key, number * self._tokens))
        return spans
