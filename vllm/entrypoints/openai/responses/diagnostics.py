"""``prompt_cache_options`` and ``prompt_cache_diagnostics``: why a prompt missed the cache."""

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from vllm.entrypoints.openai.diagnosis import comparison
from vllm.entrypoints.openai.diagnosis.bodies import FirstDifference, describe_difference
from vllm.entrypoints.openai.diagnosis.comparison import Comparison, Difference

_REASONS = {
    comparison.MODEL: "model_changed",
    comparison.TOOLS: "tools_changed",
    comparison.TOOL_CHOICE: "tools_changed",
    comparison.TEXT_FORMAT: "text_format_changed",
    comparison.EFFORT: "reasoning_effort_changed",
}
_KEY_CHANGED = "prompt_cache_key_changed"
_COMPACTED = "context_compacted"
_INPUT_CHANGED = "input_changed"


class _Diagnosis(msgspec.Struct, tag_field="type", kw_only=True):
    """Base of all; the fields are there with ``--enable-prompt-tokens-details``."""

    first_difference: FirstDifference | UnsetType = UNSET
    miss_tokens: dict[str, int] | UnsetType = UNSET
    dense_match_tokens: int | UnsetType = UNSET


class CacheHit(_Diagnosis, tag="cache_hit", kw_only=True):
    """All that both prompts could share was read from the cache."""


class CacheMiss(_Diagnosis, tag="cache_miss", kw_only=True):
    """The prompt parted from the earlier one.

    Attributes:
        reason: What differs first.
        cache_missed_tokens: Tokens from there on, whole units of the cache.
        comparison_reusable_tokens: How long the earlier prompt's reusable prefix was.
    """

    reason: str
    cache_missed_tokens: int
    comparison_reusable_tokens: int


class ComparisonNotFound(_Diagnosis, tag="comparison_response_not_found", kw_only=True):
    """There is no such response to compare with."""


class Unavailable(_Diagnosis, tag="unavailable", kw_only=True):
    """Nothing in the requests explains what was missed."""


Diagnosis = CacheHit | CacheMiss | ComparisonNotFound | Unavailable


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """What a prompt found in the cache.

    Attributes:
        num_cached: Tokens read from it.
        unit: Tokens that it shares at once; None: prefixes are not cached.
        num_cores: Engine cores, each with a cache of its own.
    """

    num_cached: int
    unit: int | None
    num_cores: int


def diagnose(found: Comparison | None, lookup: PromptLookup) -> Diagnosis:
    """Return what became of a prompt that was compared with an earlier one.

    Args:
        found: The comparison; None: there is no such request.
        lookup: What the cache gave.
    """
    if found is None:
        return ComparisonNotFound()
    if lookup.unit is None:
        return Unavailable()
    unit, first = lookup.unit, found.difference
    reusable = _floor(found.num_old - 1, unit)
    reach = min(reusable, _floor(found.num_new - 1, unit))
    begins = _floor(found.num_shared, unit)
    if first is None:
        # What opened the earlier answer need not stand in a prompt that goes on behind it.
        reach = min(reach, begins)
    if lookup.num_cached >= reach and (reach > 0 or first is None):
        return CacheHit()
    if first is not None and (first.token_offset < reach or reach == 0):
        return CacheMiss(
            reason=_reason(first, found.is_compacted),
            cache_missed_tokens=found.num_new - _floor(first.token_offset, unit),
            comparison_reusable_tokens=reusable,
        )
    if found.has_other_key and lookup.num_cores > 1 and lookup.num_cached == 0:
        return CacheMiss(
            reason=_KEY_CHANGED,
            cache_missed_tokens=found.num_new - lookup.num_cached,
            comparison_reusable_tokens=reusable,
        )
    return Unavailable()


def with_details(
    told: Diagnosis,
    found: Comparison | None,
    miss_tokens: dict[str, int] | UnsetType,
    dense_match_tokens: int | UnsetType,
) -> Diagnosis:
    """Return a diagnosis with what this server's own clients may know."""
    return msgspec.structs.replace(
        told,
        first_difference=describe_difference(found),
        miss_tokens=miss_tokens,
        dense_match_tokens=dense_match_tokens,
    )


def _floor(count: int, unit: int) -> int:
    return max(count, 0) // unit * unit


def _reason(first: Difference, is_compacted: bool) -> str:
    if first.component == comparison.MESSAGES and is_compacted:
        return _COMPACTED
    return _REASONS.get(first.component, _INPUT_CHANGED)
