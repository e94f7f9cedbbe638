"""Places to resume, sought along a long prompt."""

import random

import pytest

from vllm.v1.engine.data_parallel import resume_places
from vllm.v1.engine.data_parallel.resume_places import ResumePlaces


def in_one_place(count: int) -> list[int]:
    """Hashes that all fall on the same count."""
    unspread = pow(resume_places._SPREAD, -1, 1 << 64)
    return [i * unspread % (1 << 64) for i in range(count)]


@pytest.mark.parametrize("number", [2, 300])
def test_what_is_found_is_what_is_there_though_many_share_a_count(number: int) -> None:
    # 300 are more than a count can tell.
    rng = random.Random(number)
    places, others = ResumePlaces(), [rng.getrandbits(64) for _ in range(200)]
    chain = in_one_place(number) + others
    rng.shuffle(chain)
    there: set[int] = set()
    for _ in range(6):
        for short in rng.sample(chain, len(chain) // 2):
            if short in there and rng.random() < 0.8:
                del places[short]
                there.discard(short)
            else:
                places[short] = places.get(short, 0) | 1 << rng.randrange(3)
                there.add(short)
        low, high = rng.randrange(40), rng.randrange(60, len(chain))
        expected = [i for i in range(high, low, -1) if chain[i - 1] in there]
        assert list(places.find(chain, low, high)) == expected
    for short in chain:
        places[short] = 1
    last = in_one_place(number)[-1]
    for short in chain:
        if short != last:
            del places[short]
    assert list(places.find([last, *others], 0, 200)) == [1]
