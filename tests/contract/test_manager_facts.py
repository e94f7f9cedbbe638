"""``KVCacheManager`` by the numbers of the interface's description."""

import pytest

from tests.v1.core.cache_helpers import free_ids, ids, make_config, make_manager, make_request
from tests.v1.core.specs import full, swa
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def admit(manager: KVCacheManager, request: Request) -> tuple[KVCacheBlocks, int, KVCacheBlocks]:
    """Return the hit, its tokens, and the new blocks."""
    hit, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit
    new = manager.allocate_slots(request, num_new, num_hit, hit)
    assert new is not None
    return hit, num_hit, new


def test_ids_of_a_prompt_its_sibling_and_a_miss() -> None:
    manager = make_manager(make_config(11, [full()]))
    shared = list(range(48))
    first, second = make_request("0", shared + [3] * 7), make_request("1", shared + [4] * 5)
    hit, num_hit, new = admit(manager, first)
    assert (not hit.blocks[0], num_hit, ids(new.blocks[0])) == (True, 0, [1, 2, 3, 4])
    hit, num_hit, new = admit(manager, second)
    assert (ids(hit.blocks[0]), num_hit, ids(new.blocks[0])) == ([1, 2, 3], 48, [5])
    assert [block.ref_cnt for block in hit.blocks[0]] == [2, 2, 2]
    assert manager.block_pool.get_num_free_blocks() == 5
    manager.free(first)
    manager.free(second)
    assert free_ids(manager) == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]
    third = make_request("2", shared + [5] * 5)
    hit, _, new = admit(manager, third)
    assert (ids(hit.blocks[0]), ids(new.blocks[0])) == ([1, 2, 3], [6])
    manager.free(third)
    _, num_hit, new = admit(manager, make_request("3", [99] * 160))
    assert (num_hit, ids(new.blocks[0])) == (0, [7, 8, 9, 10, 4, 5, 6, 3, 2, 1])


def test_a_hybrids_ids() -> None:
    window = swa(sliding_window=32)
    manager = make_manager(make_config(21, [full(), window, swa(sliding_window=32)]))
    shared = list(range(48))
    first = make_request("0", shared + [3] * 7)
    _, _, new = admit(manager, first)
    assert [ids(group) for group in new.blocks] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    hit, num_hit = manager.get_computed_blocks(make_request("1", shared + [4] * 5))
    assert num_hit == 48
    assert [ids(group) for group in hit.blocks] == [[1, 2, 3], [0, 6, 7], [0, 10, 11]]


def test_a_decode_caches_a_block_once_it_is_full() -> None:
    manager = make_manager(make_config(11, [full()]))
    request = make_request("0", range(15))
    admit(manager, request)
    request.num_computed_tokens = 15
    block = manager.get_blocks("0").blocks[0][0]
    assert block.block_hash is None
    request.append_output_token_ids(7)
    assert manager.allocate_slots(request, 1) is not None
    assert block.block_hash is not None


def test_duplicates_are_allowed() -> None:
    manager = make_manager(make_config(11, [full()]))
    first = make_request("0", range(33))
    again = make_request("1", range(33), prompt_logprobs=1)
    admit(manager, first)
    hit, num_hit, new = admit(manager, again)
    assert (num_hit, not hit.blocks[0], len(new.blocks[0])) == (0, True, 3)
    one, two = (manager.get_blocks(r).blocks[0][0] for r in ("0", "1"))
    assert one is not two
    assert one.block_hash == two.block_hash


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(48, 16), (37, 16)])
def test_a_drafter_drops_a_block(num_tokens: int, num_hit: int) -> None:
    manager = make_manager(make_config(11, [full()]), use_eagle=True)
    admit(manager, make_request("0", range(num_tokens)))
    assert manager.get_computed_blocks(make_request("1", range(num_tokens)))[1] == num_hit


def test_refusals_touch_nothing() -> None:
    manager = make_manager(make_config(5, [full()]))
    first = make_request("0", range(33))
    admit(manager, first)
    manager.free(first)
    before = free_ids(manager)
    large = make_request("1", [*range(32), *[9] * 60])
    hit, num_hit = manager.get_computed_blocks(large)
    assert num_hit == 32
    assert manager.allocate_slots(large, 60, num_hit, hit) is None
    assert free_ids(manager) == before
    assert all(block.ref_cnt == 0 for block in hit.blocks[0])
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager.allocate_slots(large, 0, num_hit, hit)


def test_blocks_are_reserved_for_others() -> None:
    manager = make_manager(make_config(5, [full()]))
    request = make_request("0", range(48))
    assert manager.allocate_slots(request, 48, reserved_blocks=2) is None
    assert manager.allocate_slots(request, 48, reserved_blocks=1) is not None


def test_a_pool_admits_what_a_window_holds_at_once() -> None:
    specs = [full(block_size=8), swa(block_size=8, sliding_window=64)]
    fits = {}
    for num_blocks, num_tokens in ((64 + 13 + 1 + 13, 512), (5, 256)):
        manager = make_manager(
            make_config(num_blocks, specs), max_num_batched_tokens=32, max_model_len=1024
        )
        request = make_request("0", range(num_tokens), 8)
        blocks = manager.allocate_slots(request, 32, full_sequence_must_fit=True)
        fits[num_tokens] = blocks is not None
    assert fits == {512: True, 256: False}
