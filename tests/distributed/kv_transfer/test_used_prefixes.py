"""Which prefixes count as used most, and which are kept by name."""

import math
import random

from vllm.distributed.kv_transfer.used_prefixes import WarmList


def chain(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) for _ in range(count)]


def test_conversations_count_once_and_the_most_used_come_first() -> None:
    warm = WarmList()
    chat, rare = chain(1, 20), chain(2, 5)
    for end in (5, 9, 14, 20):
        warm.note_use(chat[:end])
    warm.note_use(rare)
    # A shorter beginning of it is the same conversation.
    warm.note_use(chat[:7])
    first, second = warm.choose({}, 8)
    assert (first.hashes, second.hashes) == (chat, rare)
    assert first.weight > 4 > second.weight
    assert [p.hashes for p in warm.choose({}, 1)] == [chat]


def test_old_use_fades() -> None:
    warm = WarmList()
    old = chain(0, 3)
    for _ in range(5):
        warm.note_use(old)
    for seed in range(1, 200):
        warm.note_use(chain(seed, 3))
    assert old not in [prefix.hashes for prefix in warm.choose({}, 64)]


def test_named_ones_come_first_while_they_are_held() -> None:
    warm = WarmList()
    warm.note_use(chain(1, 4))
    warm.note_name("rules", chain(2, 3))
    warm.note_name("gone", chain(3, 3))
    chosen = warm.choose({"rules": 60.0}, 1)
    assert [(p.name, p.seconds) for p in chosen] == [("rules", 60.0), (None, math.inf)]
    # Who was let go does not come back under its name.
    assert [p.name for p in warm.choose({"rules": 9.0, "gone": 9.0}, 0)] == ["rules"]
