"""``prompt_cache_options``: what a request asks of the cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from vllm.exceptions import UserInputError
from vllm.tokenizers.breakpoints import Breakpoint

_MODES = ("implicit", "explicit")
TTL_S = {"30m": 1800.0, "12h": 43200.0}
_MAX_ID_CHARS = 256


class PromptCacheOptions(msgspec.Struct, frozen=True):
    """The request's, defaults filled in."""

    mode: str = "implicit"
    ttl: str = "30m"
    comparison_response_id: str | None = None


@dataclass(frozen=True, slots=True)
class CacheHints:
    """What a request asks of the cache beside a comparison.

    Attributes:
        is_explicit: Whether only what is marked is kept.
        ttl_s: For how many seconds to keep its prompt at least; None: it does not say.
        prewarms: Whether the prompt alone is wanted in the cache, and no answer.
    """

    is_explicit: bool = False
    ttl_s: float | None = None
    prewarms: bool = False


def read_cache_options(value: Mapping[str, Any] | None) -> PromptCacheOptions | None:
    """Check ``prompt_cache_options``; None: the request has none.

    Raises:
        UserInputError: A field is wrong.
    """
    if value is None:
        return None
    for name, known in (("mode", _MODES), ("ttl", tuple(TTL_S))):
        given = value.get(name)
        if given is not None and (not isinstance(given, str) or given not in known):
            _refuse(name, f"is {str(given)[:60]!r}: use {' or '.join(known)}")
    prewarm, compared = value.get("prewarm"), value.get("comparison_response_id")
    if prewarm is not None and not isinstance(prewarm, bool):
        _refuse("prewarm", "must be true or false")
    is_id = isinstance(compared, str) and 0 < len(compared) <= _MAX_ID_CHARS
    if compared is not None and not is_id:
        _refuse("comparison_response_id", f"must be an id of 1 to {_MAX_ID_CHARS} characters")
    return PromptCacheOptions(value.get("mode") or "implicit", value.get("ttl") or "30m", compared)


def read_hints(value: Mapping[str, Any] | None) -> CacheHints:
    """Return what checked ``prompt_cache_options`` ask of the cache."""
    given = value or {}
    ttl = given.get("ttl")
    return CacheHints(
        is_explicit=given.get("mode") == "explicit",
        ttl_s=None if ttl is None else TTL_S[ttl],
        prewarms=given.get("prewarm") is True,
    )


def find_asked(value: Mapping[str, Any] | None, *names: str) -> list[str]:
    """Return which of some fields of ``prompt_cache_options`` ask for anything, by whole names."""
    return [f"prompt_cache_options.{name}" for name in names if (value or {}).get(name)]


def read_breakpoint_ttl(mark: Any, where: str, param: str) -> float | None:
    """Return for how many seconds a ``prompt_cache_breakpoint`` keeps; None: it does not say.

    Args:
        mark: The field.
        where: What to call it in an error.
        param: The request's field that it is in.

    Raises:
        UserInputError: It is malformed.
    """
    if not isinstance(mark, Mapping) or mark.get("mode") != "explicit":
        raise UserInputError(f'{where} must be an object with mode "explicit".', param)
    ttl = mark.get("ttl")
    if ttl is not None and (not isinstance(ttl, str) or ttl not in TTL_S):
        raise UserInputError(
            f"{where}.ttl is {str(ttl)[:60]!r}: use one of {', '.join(TTL_S)}.", param
        )
    return None if ttl is None else TTL_S[ttl]


def with_ttl(marks: Sequence[Breakpoint], ttl_s: float | None) -> list[Breakpoint]:
    """Return marks, those that do not say how long kept as long as their request says."""
    return [replace(mark, ttl_s=mark.ttl_s or ttl_s) for mark in marks]


def _refuse(name: str, why: str) -> None:
    field = f"prompt_cache_options.{name}"
    raise UserInputError(f"{field} {why}.", field)
