"""Hits and miss reasons add up to the tokens, where nothing is known of evictions."""

from vllm.v1.core.whole_block.records import whole_block_prefill_stats


def test_every_token_has_one_source() -> None:
    for num_tokens in range(70):
        for num_cached in range(num_tokens + 1):
            for num_found in range(0, num_tokens + 1, 7):
                record = whole_block_prefill_stats(
                    num_tokens=num_tokens,
                    num_cached_tokens=num_cached,
                    granularity=16,
                    num_found_tokens=num_found,
                )
                assert record.num_cached_tokens + sum(record.miss_tokens.values()) == num_tokens
                assert all(count > 0 for count in record.miss_tokens.values())


def test_reasons_with_whole_blocks() -> None:
    record = whole_block_prefill_stats(num_tokens=40, num_cached_tokens=16, granularity=16)
    assert record.miss_tokens == {"first_seen": 16, "above_last_boundary": 8}
    record = whole_block_prefill_stats(
        num_tokens=40, num_cached_tokens=0, granularity=16, num_found_tokens=16
    )
    assert record.miss_tokens == {"bypassed": 16, "first_seen": 16, "above_last_boundary": 8}
