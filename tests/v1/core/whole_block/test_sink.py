"""Sinks: blocks the model keeps for itself."""

import pytest

from tests.v1.core.cache_helpers import make_config, make_request
from tests.v1.core.cache_helpers import make_manager as make_kv_cache_manager
from tests.v1.core.specs import HALF
from tests.v1.core.whole_block.lookup_table import make_manager
from vllm.v1.core.single_type_kv_cache_manager import SinkFullAttentionManager
from vllm.v1.kv_cache_interface import SinkFullAttentionSpec


def spec(sink_len: int | None) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(
        block_size=4,
        num_kv_heads=1,
        head_size=8,
        dtype=HALF,  # type: ignore[arg-type]
        sink_len=sink_len,
    )


def test_sink_blocks_are_held_for_good() -> None:
    manager, pool = make_manager(spec(8), num_blocks=6)
    assert isinstance(manager, SinkFullAttentionManager)
    assert [block.block_id for block in manager.sink_blocks] == [1, 2]
    assert pool.get_num_free_blocks() == 3
    assert pool.get_usage() == 0.0
    assert pool.reset_prefix_cache()


@pytest.mark.parametrize("sink_len", [None, 0, 6, -4])
def test_bad_sink_len(sink_len: int | None) -> None:
    with pytest.raises(ValueError, match=f"sink_len={sink_len} is not a positive multiple"):
        make_manager(spec(sink_len))


def test_what_could_never_run_beside_the_sinks() -> None:
    # 11 usable blocks, two of them sinks: 36 tokens, 17 of them the answer's.
    manager = make_kv_cache_manager(make_config(12, [spec(8)]))
    assert manager.can_ever_fit(make_request("0", range(19), 4))
    assert not manager.can_ever_fit(make_request("1", range(20), 4))
