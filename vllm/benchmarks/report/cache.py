"""The prefix cache as the clients saw it; what a server does not report is absent, not 0."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.benchmarks.client.observation import Observation
from vllm.benchmarks.report.metrics import summarize


def cache_numbers(
    seen: Sequence[Observation],
    percents: Sequence[float],
    counted_misses: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return what is known of hits.

    Args:
        seen: All requests; failed ones are left out.
        percents: Of the times to first token.
        counted_misses: Tokens by reason as the server counted them for everybody; used where the
            answers give no reasons.

    Returns:
        Empty if the server reports no cached tokens. Rates are over the requests that report them.
    """
    known = [o for o in seen if o.success and o.usage.cached_tokens is not None]
    if not known:
        return {}
    cached, total = _sums(known)
    hits = [1e3 * o.ttft_s for o in known if o.usage.cached_tokens]
    misses = [1e3 * o.ttft_s for o in known if not o.usage.cached_tokens]
    values: dict[str, Any] = {
        "num_requests": len(known),
        "cached_tokens": cached,
        "hit_rate": cached / total if total else 0.0,
        "requests_with_hits": len(hits),
        "requests_without_hits": len(misses),
    }
    if hits:
        values |= {f"hits_{k}": v for k, v in summarize(hits, "ttft_ms", percents).items()}
    if misses:
        values |= {f"misses_{k}": v for k, v in summarize(misses, "ttft_ms", percents).items()}
    turns = _by_turn(known)
    if turns:
        values["by_turn"] = turns
    reasons = _reasons(known)
    if reasons is None and counted_misses is not None:
        reasons = dict(counted_misses)
    if reasons is not None:
        values["miss_tokens"] = reasons
    return values


def _sums(known: Sequence[Observation]) -> tuple[int, int]:
    return (
        sum(o.usage.cached_tokens or 0 for o in known),
        sum(o.num_prompt_tokens for o in known),
    )


def _by_turn(known: Sequence[Observation]) -> list[dict[str, Any]]:
    rows = []
    for turn in sorted({o.turn for o in known if o.turn is not None}):
        own = [o for o in known if o.turn == turn]
        cached, total = _sums(own)
        ttfts = [1e3 * o.ttft_s for o in own]
        rows.append(
            {
                "turn": turn,
                "num_requests": len(own),
                "cached_tokens": cached,
                "hit_rate": cached / total if total else 0.0,
                "mean_ttft_ms": sum(ttfts) / len(ttfts),
            }
        )
    return rows


def _reasons(known: Sequence[Observation]) -> dict[str, int] | None:
    told = [o.usage.miss_tokens for o in known if o.usage.miss_tokens is not None]
    if not told:
        return None
    return dict(sum((Counter(reasons) for reasons in told), Counter()).most_common())
