"""What a next start brings back, and for how long named prefixes stay kept."""

import json
import math
import random

import pytest

from vllm.distributed.kv_transfer.used_prefixes import (
    WarmList,
    WarmPrefix,
    dump_prefixes,
    load_prefixes,
)


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


@pytest.mark.parametrize(("later", "left"), [(10.0, 50.0), (-1000.0, 60.0), (61.0, None)])
def test_a_time_to_live_goes_on_over_a_restart_whatever_the_clock_does(later, left) -> None:
    data = dump_prefixes([WarmPrefix(chain(1, 3), 1.0, "rules", 60.0)], now=5000.0)
    found = load_prefixes(data, now=5000.0 + later)
    assert [p.seconds for p in found] == ([] if left is None else [left])


def test_what_was_written_is_read() -> None:
    prefixes = [WarmPrefix(chain(1, 3), 1.0, "ever"), WarmPrefix(chain(2, 7), 2.5)]
    first, second = load_prefixes(dump_prefixes(prefixes, 0.0), 9e9)
    assert (first.name, first.seconds, first.hashes) == ("ever", math.inf, prefixes[0].hashes)
    assert (second.name, second.weight, second.hashes) == (None, 2.5, prefixes[1].hashes)


def test_a_long_list_is_cut() -> None:
    data = dump_prefixes([WarmPrefix(chain(seed, 4096)) for seed in range(8)], 0.0)
    assert len(data) < 1 << 18
    assert 0 < len(load_prefixes(data, 0.0)) < 8


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"hashes": 3},
        {"hashes": "AAAA", "units": 2, "weight": 1},
        {"hashes": "AAAA", "units": 0, "weight": 1},
        {"hashes": "", "units": 1, "weight": 1},
        {"hashes": "AAAA", "units": "x", "weight": 1},
        {"hashes": "*", "units": 1, "weight": 1},
        {"hashes": "AAAA", "units": 1},
        {"hashes": "AAAA", "units": 1, "name": "n", "until": "soon", "seconds": 1},
    ],
)
def test_what_is_no_entry_is_left_out(entry) -> None:
    good = json.loads(dump_prefixes([WarmPrefix(chain(1, 2))], 0.0))
    assert len(load_prefixes(json.dumps([entry, *good]).encode(), 0.0)) == 1
    assert load_prefixes(json.dumps(entry).encode(), 0.0) == []
    assert load_prefixes(b"\xff{", 0.0) == []
