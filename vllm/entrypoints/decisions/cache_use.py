"""What a decision asks of the cache, as options of its reads.

implicit                all of it stays; a ttl keeps what the questions share so long at least
explicit, with marks    what lies before the last mark stays, and nothing behind it
explicit, without any   the questions share their input, under a salt that nobody else has
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from uuid import uuid4

from vllm.entrypoints.decisions.prompts import PromptSet
from vllm.entrypoints.openai.cache_hints import CacheHints
from vllm.entrypoints.openai.context import ServingContext
from vllm.v1.request_options import RequestOptions


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How the reads of one request use the cache.

    Attributes:
        options: Of each of them.
        reads_alone: Whether they may hit nothing of others', nor leave anything to them.
    """

    options: RequestOptions
    reads_alone: bool = False

    @classmethod
    def choose(cls, options: RequestOptions, hints: CacheHints, given: PromptSet) -> "CacheUse":
        """Return what a request's hints make of its options.

        Where it names a time, what its questions share is kept, and not the questions.
        """
        options = options.replace(cache_junctions=list(given.junctions))
        if hints.is_explicit and not given.marks:
            # Only its own marks count there, and it has none.
            return cls(options.replace(cache_salt=_salt_of_its_own(options)), reads_alone=True)
        ttls = {place: ttl_s for place, ttl_s in given.marks.items() if ttl_s is not None}
        if hints.ttl_s is not None and not hints.is_explicit and given.num_shared:
            ttls = {given.num_shared: hints.ttl_s, **ttls}
        end = max(given.marks) if hints.is_explicit else None
        return cls(
            options.replace(
                cache_boundaries=sorted(given.marks), cache_ttls=ttls, cache_insert_end=end
            )
        )

    def count_written(
        self, given: PromptSet, num_cached: Sequence[int], context: ServingContext
    ) -> int:
        """How many tokens of the prompts are in the cache now that were not there."""
        cache = context.config.cache_config
        if self.reads_alone or self.options.skip_cache_insert or not cache.enable_prefix_caching:
            return 0
        unit, end = cache.block_size, self.options.cache_insert_end
        lengths = [len(prompt.token_ids) for prompt in given.prompts]
        left = [num if end is None else min(num, end) for num in lengths]
        pairs = zip(left, num_cached, strict=True)
        return sum(max(num // unit * unit - cached, 0) for num, cached in pairs)


def _salt_of_its_own(options: RequestOptions) -> str:
    """Return a salt under which the request's own prompts find each other, and nobody else's."""
    parts = f"{options.cache_salt or ''}:{uuid4().hex}"
    return "decision-" + blake2b(parts.encode(), digest_size=20).hexdigest()
