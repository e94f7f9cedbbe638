"""A sample of spans: the same for all prompts that share a beginning."""

import hashlib

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.retention.auto.spans import MAX_SPANS, SpanSampler


def hashes_of(name: str, num_units: int) -> list[BlockHash]:
    digest, hashes = name.encode(), []
    for number in range(num_units):
        digest = hashlib.sha256(digest + number.to_bytes(4, "little")).digest()
        hashes.append(BlockHash(digest))
    return hashes


def test_a_small_pool_is_followed_whole() -> None:
    sampler = SpanSampler(unit=128, capacity_tokens=512_000)
    assert (sampler.rate, sampler.capacity) == (1, 1000)
    spans = sampler.sample(hashes_of("a", 17), 17 * 128 + 5)
    assert [span.end for span in spans] == [512, 1024, 1536, 2048]


def test_a_span_is_a_unit_at_least() -> None:
    sampler = SpanSampler(unit=1024, capacity_tokens=10_240)
    assert (sampler.tokens_per_span, sampler.capacity) == (1024, 10)
    assert [span.end for span in sampler.sample(hashes_of("a", 3), 3 * 1024)] == [1024, 2048, 3072]
    # A pool of less than a span is followed as if it held one.
    tiny = SpanSampler(unit=128, capacity_tokens=128)
    assert (tiny.rate, tiny.capacity) == (1, 1)


def test_a_pool_of_millions_of_blocks_costs_no_more() -> None:
    sampler = SpanSampler(unit=32, capacity_tokens=1_000_000_000)
    assert sampler.capacity <= MAX_SPANS
    assert sampler.capacity * sampler.tokens_per_span >= 0.99 * 1_000_000_000
    hashes = hashes_of("a", 16 * 20_000)
    spans = sampler.sample(hashes, 20_000 * 512)
    expected = 20_000 / sampler.rate
    assert 0.7 * expected < len(spans) < 1.3 * expected


def test_prompts_that_share_a_beginning_agree_on_it() -> None:
    sampler = SpanSampler(unit=128, capacity_tokens=40_000_000)
    assert sampler.rate > 1
    shared = hashes_of("a", 400)
    one = sampler.sample([*shared, *hashes_of("b", 100)], 500 * 128)
    other = sampler.sample([*shared, *hashes_of("c", 200)], 600 * 128)
    below = [span for span in one if span.end <= 400 * 128]
    assert below == [span for span in other if span.end <= 400 * 128]
    assert 0 < len(below) < 100
