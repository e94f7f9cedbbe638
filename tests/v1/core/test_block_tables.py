"""Block tables of one request with hits at one unit: of dense groups and of windows."""

from tests.v1.core.prefix.unit_caches import make_cache
from tests.v1.core.unit_cache_driver import make_manager
from tests.v1.core.v4_geometry import v4_config
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.core.single_type_kv_cache_manager import DenseTable, LiveWindow

C128 = GroupGeometry(0, False, block_size=4096, ratio=128)
WINDOW = GroupGeometry(1, True, block_size=32, keep=127)


def test_dense_groups_take_blocks_for_complete_rows_only() -> None:
    pool = make_cache(20, [0]).pool
    table = DenseTable(C128)
    assert table.num_missing(127) == 0
    assert table.num_missing(128) == 1
    assert table.num_missing(4096 + 127, 1) == 0
    table.blocks += pool.get_new_blocks(1)
    assert table.capacity() == 4096 + 127
    assert table.num_missing(4096 + 128) == 1
    table.blocks += pool.get_new_blocks(1)
    first, second = table.blocks
    assert table.blocks_below(range(2048, 8193, 2048)) == [first, first, second, second]
    assert table.blocks_below(range(4096, 8193, 4096)) == [first, second]
    pool.free_blocks(table.blocks)
    assert pool.get_num_free_blocks() == 19


def test_freeing_a_request_nobody_knows_changes_nothing() -> None:
    manager = make_manager(v4_config(32, 100), 128)
    manager.coordinator.free("unknown")
    assert manager.block_pool.get_num_free_blocks() == 99


def test_window_tables_slide_and_keep_holes() -> None:
    pool = make_cache(40, []).pool
    window = LiveWindow(WINDOW, pool.null_block)
    first = pool.get_new_blocks(4)
    window.insert([2, 3, 9, 10], first)
    assert window.base == 2
    assert [block.is_null for block in window.blocks] == [False] * 2 + [True] * 5 + [False] * 2
    assert window.find_missing([3, 4, 9, 11]) == [4, 11]
    assert window.capacity() == 11 * 32
    dropped = window.drop_below(11 * 32)
    assert window.base == 7
    assert dropped == first[1::-1], "the last one first, and no hole"
    pool.free_blocks(dropped)
    assert pool.get_num_free_blocks() == 39 - 2
    window.insert([5], pool.get_new_blocks(1))
    assert window.base == 5, "a boundary inside a chunk that is not computed yet"
    assert not window.blocks[0].is_null


def test_an_empty_window_misses_what_it_does_not_adopt() -> None:
    window = LiveWindow(WINDOW, make_cache(4, []).pool.null_block)
    assert window.find_missing([3, 4, 9, 11], range(4, 10)) == [3, 11]


def test_a_position_that_needs_nothing_drops_everything() -> None:
    state = GroupGeometry(2, True, block_size=8, align=128)
    pool = make_cache(40, []).pool
    window = LiveWindow(state, pool.null_block)
    window.insert(range(0, 16), pool.get_new_blocks(16))
    assert window.drop_below(127) == []
    assert len(window.blocks) == 16
    pool.free_blocks(window.drop_below(128))
    assert window.blocks == []
    assert pool.get_num_free_blocks() == 39
    assert window.capacity() == 0
    assert window.blocks_for(128) == ()
    assert window.find_appended(129, 129) == range(16, 17)


def test_a_step_over_a_hole_needs_a_plan() -> None:
    pool = make_cache(40, []).pool
    window = LiveWindow(WINDOW, pool.null_block)
    window.insert([0, 1], pool.get_new_blocks(2))
    assert window.find_appended(65, 65) == range(2, 3)
    assert window.find_appended(1000, 1000) is None


def test_checkpoints_name_the_blocks_of_their_rows() -> None:
    pool = make_cache(40, []).pool
    window = LiveWindow(WINDOW, pool.null_block)
    blocks = pool.get_new_blocks(6)
    window.insert(range(3, 9), blocks)
    assert window.blocks_for(8 * 32) == tuple(blocks[1:5])
    other = LiveWindow(WINDOW, pool.null_block)
    other.adopt(8 * 32, blocks[1:5])
    assert other.base == 4
    assert other.blocks == blocks[1:5]


def test_the_worker_hears_of_what_was_inserted_and_replaced_only() -> None:
    pool = make_cache(40, []).pool
    window = LiveWindow(WINDOW, pool.null_block)
    assert window.is_dirty
    *blocks, other = pool.get_new_blocks(9)
    window.is_dirty = False
    window.insert([], [])
    assert not window.is_dirty
    window.insert(range(8), blocks)
    assert window.is_dirty
    window.is_dirty = False
    assert window.drop_below(8 * 32)
    assert not window.is_dirty
    assert window.replace_last(other) is blocks[-1]
    assert window.is_dirty
    assert window.blocks[-1] is other
