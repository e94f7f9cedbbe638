"""Block tables of dense and window groups."""

from vllm.v1.core.unit_block_pool import UnitBlockPool
from vllm.v1.core.unit_groups import DenseGroup, WindowGroup

from vllm.v1.core.policy.geometry import GroupGeometry

C128 = GroupGeometry(0, False, block_size=4096, ratio=128)
WINDOW = GroupGeometry(1, True, block_size=32, keep=127)


def test_dense_groups_take_blocks_for_complete_rows_only() -> None:
    pool = UnitBlockPool(20, [0])
    group = DenseGroup(C128, pool)
    assert group.num_missing("r", 127, 0) == 0
    assert group.num_missing("r", 128, 0) == 1
    assert group.num_missing("r", 4096 + 127, 1) == 0
    group.extend("r", pool.get_new_blocks(1))
    assert group.capacity("r") == 4096 + 127
    assert group.num_missing("r", 4096 + 128, 0) == 1
    group.extend("r", pool.get_new_blocks(1))
    first, second = group.tables["r"]
    assert group.blocks_below("r", [128, 4096, 4097]) == [first, first, second]
    group.free("r")
    assert pool.get_num_free_blocks() == 19
    group.free("unknown")


def test_window_tables_slide_and_keep_holes() -> None:
    pool = UnitBlockPool(40, [])
    group = WindowGroup(WINDOW, pool)
    group.insert("r", [2, 3, 9, 10], pool.get_new_blocks(4))
    table = group.tables["r"]
    assert table.base == 2
    assert [block.is_null for block in table.blocks] == [False] * 2 + [True] * 5 + [False] * 2
    assert group.find_missing("r", [3, 4, 9, 11], range(0)) == [4, 11]
    assert group.capacity("r") == 11 * 32
    group.drop_below("r", 11 * 32)
    assert table.base == 7
    assert pool.get_num_free_blocks() == 39 - 2
    group.insert("r", [5], pool.get_new_blocks(1))
    assert table.base == 5, "a boundary inside a chunk that is not computed yet"
    assert not table.blocks[0].is_null


def test_a_position_that_needs_nothing_drops_everything() -> None:
    state = GroupGeometry(2, True, block_size=8, align=128)
    pool = UnitBlockPool(40, [])
    group = WindowGroup(state, pool)
    group.insert("r", range(0, 16), pool.get_new_blocks(16))
    group.drop_below("r", 127)
    assert len(group.tables["r"].blocks) == 16
    group.drop_below("r", 128)
    assert group.tables["r"].blocks == []
    assert group.capacity("r") == 0
    assert group.blocks_for("r", 128) == ()
    assert group.find_appended("r", 129, 129) == range(16, 17)


def test_a_step_over_a_hole_needs_a_plan() -> None:
    pool = UnitBlockPool(40, [])
    group = WindowGroup(WINDOW, pool)
    group.insert("r", [0, 1], pool.get_new_blocks(2))
    assert group.find_appended("r", 65, 65) == range(2, 3)
    assert group.find_appended("r", 1000, 1000) is None


def test_checkpoints_name_the_blocks_of_their_rows() -> None:
    pool = UnitBlockPool(40, [])
    group = WindowGroup(WINDOW, pool)
    blocks = pool.get_new_blocks(6)
    group.insert("r", range(3, 9), blocks)
    assert group.blocks_for("r", 8 * 32) == tuple(blocks[1:5])
    group.adopt("s", 8 * 32, blocks[1:5])
    assert group.tables["s"].base == 4
