"""Cross attention: sized by the encoder, never cached."""

import pytest

from tests.v1.core.cache_helpers import make_request
from tests.v1.core.specs import HALF
from tests.v1.core.whole_block.lookup_table import find, make_manager
from vllm.v1.kv_cache_interface import CrossAttentionSpec

SPEC = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=HALF)  # type: ignore[arg-type]


def test_nothing_is_cached() -> None:
    manager, pool = make_manager(SPEC)
    with pytest.raises(ValueError, match="cannot be cached"):
        manager.cache_blocks(make_request("0", range(8), 4), 8)
    with pytest.raises(NotImplementedError):
        find(manager, pool, [True])


def test_adoption_and_external_tokens_take_nothing() -> None:
    manager, pool = make_manager(SPEC)
    manager.allocate_new_computed_blocks("0", [], 0, 8)
    assert pool.get_num_free_blocks() == 99
    assert manager.counts_encoder_tokens
