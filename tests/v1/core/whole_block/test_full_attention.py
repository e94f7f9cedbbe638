"""Full attention: left to right until a miss."""

from itertools import product

from tests.v1.core.specs import full
from tests.v1.core.whole_block.lookup_table import find, make_manager


def test_lookup_against_an_oracle() -> None:
    manager, pool = make_manager(full(block_size=2))
    for num_blocks in range(7):
        for is_cached in product((True, False), repeat=num_blocks):
            run = (*is_cached, False).index(False)
            for per, drop in product((1, 2, 3), (False, True)):
                expected = max(run - drop, 0) // per * per
                found = find(manager, pool, is_cached, 1, drop, alignment_tokens=2 * per)
                assert len(found) == expected
                assert not any(block.is_null for block in found)


def test_max_length_bounds_the_hit() -> None:
    manager, pool = make_manager(full(block_size=2))
    assert len(find(manager, pool, [True] * 4, -1)) == 3
    assert find(manager, pool, [], -1) == []


def test_common_prefix() -> None:
    manager, pool = make_manager(full(block_size=2))
    manager.allocate_new_blocks("0", num_tokens=6, num_tokens_main_model=6)
    assert manager.get_num_common_prefix_blocks("0") == 3
    shared = manager.req_to_blocks["0"][:2]
    manager.allocate_new_computed_blocks("1", shared, 4, 0)
    manager.allocate_new_blocks("1", num_tokens=8, num_tokens_main_model=8)
    assert manager.get_num_common_prefix_blocks("0") == 2
    manager.allocate_new_blocks("2", num_tokens=2, num_tokens_main_model=2)
    assert manager.get_num_common_prefix_blocks("0") == 0
    assert pool.get_num_free_blocks() == 99 - 6
