"""Groups of full and window attention whose pages cannot be made equal by larger window blocks.

A window's block must divide the unit of hits, so it cannot grow where a full layer's page is the
wider one (Gemma 4 E2B: 1,024 values a token in full layers, 512 in those with a window). Then all
groups share one packed pool, whose row is so wide that as little as possible of it is unused:

    E2B       full group    | layer 4      | layer 9      | layer 14     |
    3 + 12    window group  | L0   | L1    | L2   | L3    | L5   | L6    |     twice
    E4B       full group    | layer 5      | layer 11     |                    twice
    4 + 20    window group  | L0   | L1    | L2   | L3    |                    five times
"""

from collections import defaultdict
from collections.abc import Mapping

from vllm.utils.math_utils import cdiv
from vllm.v1.core.layout.packing import padded_page_bytes
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

Buckets = Mapping[KVCacheSpec, list[str]]
# Shares of padding nearer to each other than this count as one: fewer groups are then better.
_SHARE_DIGITS = 2


def group_unequal_widths(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec] | None:
    """Group full and window layers for a packed pool.

    Args:
        specs: Spec by layer.

    Returns:
        Groups of one kind and width each, full ones first; None where it is another kind of model,
        or larger blocks of full layers make all pages equal.
    """
    full = [spec for spec in specs.values() if spec.keeps_every_token]
    windows = [spec for spec in specs.values() if spec.window_tokens is not None]
    if not full or not windows or len(full) + len(windows) < len(specs):
        return None
    widest = max(spec.page_size_bytes for spec in windows)
    if all(spec.page_size_bytes == widest for spec in windows) and all(
        widest % spec.page_size_bytes == 0 for spec in full
    ):
        return None
    buckets: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        if spec.keeps_every_token:
            spec = spec.with_larger_page(max(1, widest // spec.page_size_bytes))
        buckets[spec].append(name)
    width = find_row_width(
        {padded_page_bytes(spec): len(names) for spec, names in _merge_pages(buckets).items()}
    )
    groups = []
    for spec, names in sorted(buckets.items(), key=lambda item: not item[0].keeps_every_token):
        num_parts = cdiv(len(names), width // padded_page_bytes(spec))
        groups += [KVCacheGroupSpec(names[part::num_parts], spec) for part in range(num_parts)]
    return groups


def _merge_pages(buckets: Buckets) -> Buckets:
    """Return the buckets with those of equal pages joined: they are cut alike."""
    by_page: dict[int, KVCacheSpec] = {}
    merged: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for spec, names in buckets.items():
        merged[by_page.setdefault(padded_page_bytes(spec), spec)] += names
    return merged


def find_row_width(layers: Mapping[int, int]) -> int:
    """Return how wide a pool's rows are best.

    Args:
        layers: Bytes of a page -> how many layers have such.

    Returns:
        Bytes: of the widths that waste least of the kind that wastes most, the largest.
    """
    widest = max(layers)
    candidates = [widest * count for count in range(1, max(layers.values()) + 1)]

    def judge(width: int) -> tuple[float, int]:
        parts = {page: cdiv(count, width // page) for page, count in layers.items()}
        shares = [parts[page] * width / (count * page) for page, count in layers.items()]
        return round(max(shares), _SHARE_DIGITS), sum(parts.values())

    return min(candidates, key=judge)
