"""What is in flight: counted once, and gone when it ends."""

import random
from collections import Counter

from vllm.v1.engine.data_parallel.in_flight import InFlight


def test_a_request_counts_until_its_prompt_is_computed_and_until_it_ends() -> None:
    flight = InFlight(2)
    flight.add("a", 1, [1, 2, 3], 96)
    assert flight.num_requests(1) == 1
    assert flight.backlog_tokens(1) == 96
    assert flight.num_pending_units(1, [1, 2, 9]) == 2
    assert flight.num_pending_units(0, [1]) == 0
    flight.note_computed("a")
    flight.note_computed("a")
    assert (flight.num_requests(1), flight.backlog_tokens(1)) == (1, 0)
    assert flight.num_pending_units(1, [1]) == 0
    assert flight.remove("a") == 1
    assert flight.remove("a") is None
    assert flight.num_requests(1) == 0


def test_any_history_leaves_nothing_behind() -> None:
    rng = random.Random(5)
    flight = InFlight(3)
    alive: dict[str, tuple[int, list[int], int]] = {}
    for number in range(400):
        if rng.random() < 0.5 or not alive:
            hashes = rng.sample(range(10), rng.randrange(6))
            rank, work = rng.randrange(3), rng.randrange(50)
            flight.add(str(number), rank, hashes, work)
            alive[str(number)] = (rank, hashes, work)
        elif rng.random() < 0.5:
            name = rng.choice(list(alive))
            flight.note_computed(name)
            alive[name] = (alive[name][0], [], 0)
        else:
            name = rng.choice(list(alive))
            assert flight.remove(name) == alive.pop(name)[0]
        counts = Counter(rank for rank, _, _ in alive.values())
        for rank in range(3):
            mine = [entry for entry in alive.values() if entry[0] == rank]
            assert flight.num_requests(rank) == counts[rank]
            assert flight.backlog_tokens(rank) == sum(work for _, _, work in mine)
            known = {short for _, hashes, _ in mine for short in hashes}
            expected = next((i for i in range(10) if i not in known), 10)
            assert flight.num_pending_units(rank, list(range(10))) == expected
    lost = flight.take_all(0)
    assert sorted(lost) == sorted(name for name, entry in alive.items() if entry[0] == 0)
    assert flight.num_requests(0) == 0
