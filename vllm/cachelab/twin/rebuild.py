"""From a trace's header to the settings of the cache that was recorded, and its requests."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vllm.cachelab.sim.settings import SimSettings
from vllm.cachelab.trace.events import Header
from vllm.cachelab.twin.trace_file import RecordedRequest
from vllm.exceptions import ConfigError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.engine.cache_trace import describe_groups
from vllm.v1.request import Request
from vllm.v1.request_options import RequestOptions

_REPLAYED = "vllm.cachelab.twin.tier:ReplayedTier"
_SIMULATED = "vllm.cachelab.sim.tier:SimTier"


def settings_of(header: Header, *, is_recorded: bool = False) -> SimSettings:
    """Return the recorded settings.

    Args:
        header: Of the trace.
        is_recorded: Whether nothing will be otherwise than recorded, what the disk does neither.
    """
    cache, tier = header.cache, header.tier
    if tier is not None:
        tier = {"class": _REPLAYED if is_recorded else _SIMULATED, "extra": tier["extra"]}
    return SimSettings(
        header.hf_config,
        block_size=cache["block_size"],
        dtype="float32",
        cache_dtype=cache["dtype"],
        num_blocks=cache["num_blocks"],
        pool_bytes=cache["num_blocks"] * cache["block_bytes"],
        interval=cache["interval"],
        pinned_share=cache["pinned_share"],
        enable_prefix_caching=cache["enable_prefix_caching"],
        max_model_len=header.max_model_len,
        scheduler=header.scheduler,
        speculative=header.speculative,
        tier=tier,
        parallel=header.parallel,
        images=header.images,
        # When a tower ended is known of the recorded run alone.
        runs_towers=not is_recorded,
    )


def check_rebuilt(header: Header, settings: SimSettings) -> None:
    """Refuse a trace whose cache cannot be rebuilt here.

    Raises:
        ConfigError: The groups come out otherwise than recorded.
    """
    plan = settings.make_plan(settings.make_config())
    found = describe_groups(plan)
    if found != [tuple(group) for group in header.groups]:
        raise ConfigError(
            f"The recorded cache has groups of (block size, page bytes) {header.groups}, and its "
            f"settings give {found} here: it was recorded by another version ({header.server}), "
            "or on a platform with pages of its own."
        )


@contextmanager
def environment_of(header: Header, changes: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set the variables that the cache read, for as long as it is built."""
    wanted = {**header.environment, **(changes or {})}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True)
class KnownHashes:
    """Hashes that were recorded, given out as the sequence grows.

    Attributes:
        hashes: One per unit of the whole sequence.
        unit: Tokens under one of them.
        number: Of the request; units nobody recorded get hashes of their own.
    """

    hashes: Sequence[BlockHash]
    unit: int
    number: int

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of full units that have none yet."""
        first = len(request.block_hashes)
        last = request.num_tokens // self.unit
        if first == last:
            return []
        made = list(self.hashes[first:last])
        for i in range(first + len(made), last):
            made.append(BlockHash(b"?" + (self.number << 32 | i).to_bytes(15, "little")))
        return made


def regroup(hashes: Sequence[BlockHash], unit: int, wanted: int) -> list[BlockHash]:
    """Return the hashes of larger units: that of the last small one says all before it.

    Raises:
        ConfigError: The wanted unit is no multiple of the recorded one.
    """
    if wanted % unit:
        raise ConfigError(
            f"The trace was recorded with --block-size {unit}: {wanted} is no multiple of it. "
            f"Record with a smaller one to try {wanted}."
        )
    step = wanted // unit
    return list(hashes[step - 1 :: step])


def _feature(offset: int, length: int, name: str) -> MultiModalFeatureSpec:
    """A picture by its name: nothing here depends on what it shows."""
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))


def make_request(
    recorded: RecordedRequest,
    recorded_unit: int,
    unit: int,
    max_tokens: int,
    stop_token_ids: Sequence[int] = (),
    *,
    has_eyes: bool = False,
) -> Request:
    """Return the scheduler's request.

    Args:
        recorded: What is known of it.
        recorded_unit: Tokens under one recorded hash.
        unit: Tokens under one hash now.
        max_tokens: Of its answer.
        stop_token_ids: Tokens that end it.
        has_eyes: Whether pictures are shown: as what they are, and not as text.
    """
    added = recorded.added
    prompt = [0] * added.num_prompt_tokens
    for position, token in recorded.tokens.items():
        if position < len(prompt):
            prompt[position] = token
    hashes = regroup(recorded.hashes, recorded_unit, unit)
    return Request(
        added.request_id,
        prompt,
        SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=list(stop_token_ids),
            skip_reading_prefix_cache=added.skips_cache or None,
            prompt_logprobs=added.num_scores,
        ),
        arrival_time=added.arrival_time,
        priority=added.priority,
        mm_features=[_feature(*image) for image in added.images] if has_eyes else None,
        block_hasher=KnownHashes(hashes, unit, added.number),
        cache_boundaries=added.boundaries,
        cache_ttls={place: math.inf if ttl is None else ttl for place, ttl in added.ttls},
        options=RequestOptions(
            skip_cache_insert=added.skips_insert,
            cache_junctions=added.junctions,
            prompt_cache_retention="in_memory" if added.stays_in_memory else None,
            is_spare=added.is_spare,
            cache_insert_end=added.insert_end,
        ),
        session=added.session,
    )
