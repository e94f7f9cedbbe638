"""Chains of unit hashes with what is known already left out."""

import secrets
from base64 import b64encode
from collections.abc import Sequence

from vllm.cachelab.trace.events import HASH_BYTES, Units
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request

# Hashes remembered; then all are forgotten, and the next prompts are written whole again.
_MAX_KNOWN = 200_000
_NUMBER_BITS = 31


class HashChains:
    """Says what is new of a chain.

    Owns: the hashes written since the part began; the numbers that stand for tokens.

    Args:
        unit: Tokens under one hash.
        keeps_tokens: Whether the tokens behind units are told, under numbers of their own.
    """

    def __init__(self, unit: int, *, keeps_tokens: bool) -> None:
        self._unit = unit
        self._keeps_tokens = keeps_tokens
        self._known: set[bytes] = set()
        self._numbers: dict[int, bytes] = {}

    def forget(self) -> None:
        """Begin anew: the next file must be readable without this one."""
        self._known.clear()

    def prompt(self, request: Request) -> Units:
        """Return the units of a new request, from the first that is not known."""
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        hashes = self._cut(request.block_hashes)
        num_known = self._count_known(hashes)
        self._known.update(hashes[num_known:])
        return self._units(request.following_tokens, hashes, num_known, 1)

    def known_to_others(self, request: Request) -> Units:
        """Return the units of a request that others have brought by now; nothing of its own."""
        num_known = self._count_known(self._cut(request.block_hashes))
        if not num_known:
            return Units("", 0, "", "")
        hashes = self._cut(request.block_hashes[:num_known])
        tokens = request.following_tokens[: num_known * self._unit + 1]
        return self._units(tokens, hashes, num_known, 1)

    def answer(self, request: Request) -> Units:
        """Return the units behind a prompt's."""
        hashes = self._cut(request.block_hashes)
        num_known = request.num_prompt_tokens // self._unit
        if num_known == 0 or hashes[num_known - 1] in self._known:
            # Else the prompt stands in an earlier part, which may be gone when this one is read.
            self._known.update(hashes[num_known:])
        # The token at a prompt's very end is the answer's first.
        first_end = -(-request.num_prompt_tokens // self._unit)
        return self._units(request.following_tokens, hashes, num_known, first_end)

    def _units(
        self, tokens: Sequence[int], hashes: list[bytes], num_known: int, first_end: int
    ) -> Units:
        after = b64encode(hashes[num_known - 1]).decode() if num_known else ""
        told = self._next_tokens(tokens, first_end) if self._keeps_tokens else ""
        return Units(after, num_known, b64encode(b"".join(hashes[num_known:])).decode(), told)

    @staticmethod
    def _cut(hashes: Sequence[BlockHash]) -> list[bytes]:
        return [prefix_hash[:HASH_BYTES] for prefix_hash in hashes]

    def _count_known(self, hashes: list[bytes]) -> int:
        """Return how many leading hashes are known; known ones come first, so halving finds it."""
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._known:
                low = middle
            else:
                high = middle - 1
        return low

    def _next_tokens(self, tokens: Sequence[int], first_end: int) -> str:
        """Return the tokens behind units, from the one behind unit ``first_end - 1`` on."""
        ends = range(first_end * self._unit, len(tokens), self._unit)
        numbers = [self._number(tokens[i]) for i in ends]
        return b64encode(b"".join(numbers)).decode()

    def number_of(self, token_id: int | None) -> int:
        """Return what stands for a token; 0 where tokens do not matter, -1 for none."""
        if token_id is None:
            return -1
        return int.from_bytes(self._number(token_id), "little") if self._keeps_tokens else 0

    def _number(self, token_id: int) -> bytes:
        number = self._numbers.get(token_id)
        if number is None:
            number = secrets.randbits(_NUMBER_BITS).to_bytes(4, "little")
            self._numbers[token_id] = number
        return number
