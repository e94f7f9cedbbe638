"""Which checkpoints a window block belongs to, while their maker runs and afterwards."""

import random

from tests.v1.core.prefix.unit_caches import h
from vllm.v1.core.prefix.members import Members
from vllm.v1.core.values.free_block_queue import KVCacheBlock
from vllm.v1.core.values.hit import Checkpoint

BLOCKS = [KVCacheBlock(block_id) for block_id in range(1, 9)]


def checkpoint(name: str, *groups: tuple[int, ...]) -> Checkpoint:
    return Checkpoint(h(name), 32, tuple(tuple(BLOCKS[i] for i in group) for group in groups))


def entered(members: Members) -> dict[int, set[str]]:
    return {
        block_id - 1: {record.prefix_hash.decode() for record in records}
        for block_id, records in members.entered.items()
    }


def test_of_an_open_checkpoint_only_what_was_given_back_is_entered() -> None:
    members, p = Members(), checkpoint("p", (0, 1, 2), (3,))
    members.open(p)
    assert not members.entered
    assert not members.blocks_of(p)
    members.give_back(p, {BLOCKS[7], BLOCKS[0], BLOCKS[1]})
    assert entered(members) == {0: {"p"}, 1: {"p"}}
    assert [b.block_id for b in members.blocks_of(p)] == [1, 2]
    members.give_back(p, {BLOCKS[3]})
    assert entered(members) == {0: {"p"}, 1: {"p"}, 3: {"p"}}
    assert list(members.open_ones_with(BLOCKS[2])) == [p]
    assert not list(members.open_ones_with(BLOCKS[0]))
    members.close(p)
    assert entered(members) == {i: {"p"} for i in range(4)}
    assert not list(members.open_ones_with(BLOCKS[2]))


def test_removing_an_open_checkpoint_returns_what_may_be_free() -> None:
    members, p, q = Members(), checkpoint("p", (0, 1, 2)), checkpoint("q", (1, 2, 3))
    for record in (p, q):
        members.open(record)
        members.give_back(record, {BLOCKS[0], BLOCKS[1]})
    assert entered(members) == {0: {"p"}, 1: {"p", "q"}}
    assert [b.block_id for b in members.remove(p)] == [1, 2]
    assert entered(members) == {1: {"q"}}
    members.give_back(p, {BLOCKS[2]})
    members.close(p)
    assert entered(members) == {1: {"q"}}, "what is removed is told of in vain"


def test_membership_is_that_of_plain_lists() -> None:
    rng = random.Random(0)
    for _ in range(200):
        members = Members()
        held: dict[Checkpoint, list[list[KVCacheBlock]]] = {}
        for number in range(6):
            start = rng.randrange(6)
            groups = (tuple(range(start, rng.randint(start, 6))), (6, 7)[: rng.randrange(3)])
            record = checkpoint(str(number), *groups)
            members.open(record)
            held[record] = [list(group) for group in record.blocks]
            chosen = rng.choice(list(held))
            match rng.randrange(3):
                case 0:
                    given = set(rng.sample(BLOCKS, 4))
                    members.give_back(chosen, given)
                    for group in held[chosen]:
                        while group and group[0] in given:
                            del group[0]
                case 1:
                    members.close(chosen)
                    held[chosen] = [[], []]
                case _:
                    members.remove(chosen)
                    del held[chosen]
        expected: dict[int, set[str]] = {}
        for record, left in held.items():
            for block in {*record.all_blocks()}.difference(*left):
                expected.setdefault(block.block_id - 1, set()).add(record.prefix_hash.decode())
        assert entered(members) == expected
