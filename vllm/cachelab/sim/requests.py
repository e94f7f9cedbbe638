"""Requests whose tokens nobody knows: only which prefixes are equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request
from vllm.v1.request_options import NO_OPTIONS, RequestOptions

# Odd, so that no two keys have the same product.
_SPREAD = 0x9E37_79B9_7F4A_7C15
_MAX_HALF = (1 << 64) - 1

Hasher = Callable[[Request], list[BlockHash]]


@dataclass(frozen=True, slots=True)
class PrefixUnits:
    """A prompt known only by ids of equal prefixes, as in published traces.

    Two prompts share the tokens of a span iff they have the same id there, so a unit's hash is the
    span's id with the unit's place in it; the answer's units are hashed by request and hit nothing.

    Attributes:
        number: Of the request, unique.
        span_ids: One id per ``span`` tokens of the prompt.
        unit: Tokens of a unit. Where no span ends with it, the span that holds its last token
            decides: all of that span's tokens count as different or as equal.
        span: Tokens under one id.
    """

    number: int
    span_ids: Sequence[int]
    unit: int
    span: int = 512

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of full units that have none yet."""
        first = len(request.block_hashes)
        last = request.num_tokens // self.unit
        if first == last:
            return []
        in_prompt = min(last, request.num_prompt_tokens // self.unit)
        per_span = -(-self.span // self.unit)
        hashes = []
        for i in range(first, in_prompt):
            span = ((i + 1) * self.unit - 1) // self.span
            place = i - span * self.span // self.unit
            key = self.span_ids[span] * per_span + place
            hashes.append(_make_hash(key))
        for i in range(max(first, in_prompt), last):
            hashes.append(BlockHash(b"a" + (self.number << 32 | i).to_bytes(15, "little")))
        return hashes


def _make_hash(key: int) -> BlockHash:
    """Return 16 bytes, as many as name what lies behind the pool; both halves differ by key."""
    if key > _MAX_HALF:
        # Ids that are hashes themselves: some traces have 64 bits of them, others 128.
        raw = key.to_bytes(key.bit_length() // 8 + 1, "little")
        return BlockHash(blake2b(raw, digest_size=16).digest())
    spread = key * _SPREAD & _MAX_HALF
    return BlockHash(key.to_bytes(8, "little") + spread.to_bytes(8, "little"))


def at_unit(span_ids: Sequence[int], span: int, unit: int) -> tuple[Sequence[int], int, int]:
    """Return ids, unit and tokens of an id for ``PrefixUnits``.

    Of several spans in a unit the last counts: an id stands for all tokens up to there.
    """
    if span >= unit:
        return span_ids, unit, span
    per_unit = unit // span
    return span_ids[per_unit - 1 :: per_unit], unit, unit


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a simulated load.

    Attributes:
        request_id: Its name.
        num_prompt_tokens: Of its prompt.
        num_output_tokens: Of its answer.
        hasher: Knows its prefixes.
        arrival_s: When it comes.
        turn: Its turn or round, if the load has any.
        tenant: Whose it is, if anybody's.
        options: What its client says of it.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    hasher: Hasher
    arrival_s: float = 0.0
    turn: int | None = None
    tenant: str | None = None
    options: RequestOptions = NO_OPTIONS

    def make(self) -> Request:
        """Return the scheduler's request."""
        return Request(
            self.request_id,
            [0] * self.num_prompt_tokens,
            SamplingParams(max_tokens=max(1, self.num_output_tokens), ignore_eos=True),
            arrival_time=self.arrival_s,
            block_hasher=self.hasher,
            tenant=self.tenant,
            options=self.options,
        )
