import random

import pytest

from vllm.v1.core.values.free_block_queue import FreeKVCacheBlockQueue, KVCacheBlock


def make_blocks(n, start=0):
    return [KVCacheBlock(block_id=i) for i in range(start, start + n)]


def ids(queue):
    """Ids front to back, checked against the links walked back to front and against the count."""
    forward = [block.block_id for block in queue.get_all_free_blocks()]
    backward = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backward.append(block.block_id)
        block = block.prev_free_block
    assert forward == backward[::-1]
    assert queue.num_free_blocks == len(forward)
    return forward


class TestKVCacheBlock:
    def test_fields(self):
        block = KVCacheBlock(3)
        assert (block.block_id, block.ref_cnt, block.is_null) == (3, 0, False)
        assert block.block_hash is None
        assert block.prev_free_block is None
        assert block.next_free_block is None

    def test_hash_is_set_once(self):
        block = KVCacheBlock(0)
        block.block_hash = b"key"
        with pytest.raises(AssertionError, match="already has a hash"):
            block.block_hash = b"other"
        assert block.block_hash == b"key"
        block.reset_hash()
        assert block.block_hash is None
        block.block_hash = b"other"

    def test_slots(self):
        block = KVCacheBlock(0)
        assert not hasattr(block, "__dict__")
        with pytest.raises(AttributeError):
            block.unknown = 1

    def test_identity(self):
        assert KVCacheBlock(1) != KVCacheBlock(1)
        assert len({KVCacheBlock(1), KVCacheBlock(1)}) == 2

    def test_repr_does_not_walk_the_queue(self):
        blocks = make_blocks(1000)
        FreeKVCacheBlockQueue(blocks)
        assert "prev_free_block=499, next_free_block=501" in repr(blocks[500])


def test_empty_queue():
    queue = FreeKVCacheBlockQueue([])
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    assert head.block_id == tail.block_id == -1
    assert head.next_free_block is tail
    assert tail.prev_free_block is head
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    assert queue.popleft_n(0) == []
    assert queue.peekleft() is None
    assert ids(queue) == []


def test_popleft_and_append():
    blocks = make_blocks(3)
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue.peekleft() is blocks[0]
    assert ids(queue) == [0, 1, 2]
    first = queue.popleft()
    assert first is blocks[0]
    assert (first.prev_free_block, first.next_free_block) == (None, None)
    queue.append(first)
    assert ids(queue) == [1, 2, 0]
    while queue.num_free_blocks:
        queue.popleft()
    assert ids(queue) == []
    queue.append(first)
    assert ids(queue) == [0]


def test_popleft_n():
    blocks = make_blocks(6)
    queue = FreeKVCacheBlockQueue(blocks)
    taken = queue.popleft_n(4)
    assert taken == blocks[:4]
    assert all(b.prev_free_block is None and b.next_free_block is None for b in taken)
    assert ids(queue) == [4, 5]
    with pytest.raises(AssertionError, match="3 free blocks were asked for, 2 are there"):
        queue.popleft_n(3)
    assert queue.popleft_n(2) == blocks[4:]
    assert ids(queue) == []


def test_remove():
    blocks = make_blocks(5)
    queue = FreeKVCacheBlockQueue(blocks)
    for block_id, rest in [(2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])]:
        queue.remove(blocks[block_id])
        assert ids(queue) == rest
    with pytest.raises(RuntimeError, match="Block 2 is in no free queue"):
        queue.remove(blocks[2])
    assert ids(queue) == [1, 3]


def test_append_n():
    queue = FreeKVCacheBlockQueue([])
    queue.append_n([])
    assert ids(queue) == []
    blocks = make_blocks(5)
    queue.append_n(blocks[:2])
    queue.append_n(blocks[2:])
    queue.append_n([])
    assert ids(queue) == [0, 1, 2, 3, 4]


def test_append_n_to_a_broken_tail():
    queue = FreeKVCacheBlockQueue(make_blocks(1))
    queue.fake_free_list_tail.prev_free_block = None
    queue.append_n([])
    with pytest.raises(AssertionError):
        queue.append_n(make_blocks(2, start=5))
    assert queue.num_free_blocks == 1
    with pytest.raises(RuntimeError):
        queue.append(KVCacheBlock(9))


def test_prepend_n():
    blocks = make_blocks(10)
    queue = FreeKVCacheBlockQueue(blocks[:3])
    queue.prepend_n([])
    queue.prepend_n([blocks[4], blocks[5]])
    assert ids(queue) == [4, 5, 0, 1, 2]
    queue.prepend_n([blocks[7]])
    assert ids(queue) == [7, 4, 5, 0, 1, 2]
    assert queue.popleft() is blocks[7]
    empty = FreeKVCacheBlockQueue([])
    empty.prepend_n(blocks[8:])
    assert ids(empty) == [8, 9]


@pytest.mark.parametrize("seed", range(20))
def test_against_a_list(seed):
    rng = random.Random(seed)
    blocks = make_blocks(12)
    queue, model, out = FreeKVCacheBlockQueue(blocks), list(blocks), []
    for _ in range(200):
        match rng.choice(["pop", "pop_n", "remove", "append", "append_n", "prepend_n"]):
            case "pop" if model:
                out.append(model.pop(0))
                assert queue.popleft() is out[-1]
            case "pop_n":
                n = rng.randint(0, len(model))
                taken, model = model[:n], model[n:]
                assert queue.popleft_n(n) == taken
                out += taken
            case "remove" if model:
                block = model.pop(rng.randrange(len(model)))
                queue.remove(block)
                out.append(block)
            case "append" if out:
                block = out.pop(rng.randrange(len(out)))
                queue.append(block)
                model.append(block)
            case "append_n" | "prepend_n" as name:
                rng.shuffle(out)
                n = rng.randint(0, len(out))
                given, out = out[:n], out[n:]
                getattr(queue, name)(given)
                model = model + given if name == "append_n" else given + model
        assert ids(queue) == [block.block_id for block in model]
