"""What a server's own counters say of a load, where its answers do not."""

from collections.abc import Mapping
from itertools import chain

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from vllm.benchmarks.client.target import Target

_MISSES = "vllm:prefix_cache_miss_tokens_total"


async def read_miss_tokens(session: aiohttp.ClientSession, target: Target) -> dict[str, int] | None:
    """Return the tokens that missed so far, by reason, of all engines; None: nobody counts them."""
    url = target.base_url.rstrip("/") + "/metrics"
    try:
        async with session.get(url, headers=target.all_headers()) as response:
            if response.status != 200:
                return None
            text = await response.text(errors="replace")
        families = list(text_string_to_metric_families(text))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        # Many servers have no such page, or another one: their reasons are absent.
        return None
    counted: dict[str, int] = {}
    for sample in chain.from_iterable(family.samples for family in families):
        reason = sample.labels.get("reason")
        if sample.name == _MISSES and reason is not None:
            counted[reason] = counted.get(reason, 0) + round(sample.value)
    return counted or None


def counted_between(
    before: Mapping[str, int] | None, after: Mapping[str, int] | None
) -> dict[str, int] | None:
    """Return what was counted meanwhile, most first; None: unknown, or the server began anew."""
    if before is None or after is None:
        return None
    grown = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    if min(grown.values(), default=0) < 0:
        return None
    found = sorted(grown.items(), key=lambda item: -item[1])
    return {reason: count for reason, count in found if count}
