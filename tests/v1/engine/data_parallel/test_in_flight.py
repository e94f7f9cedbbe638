"""What is in flight: counted once, and gone when it ends."""

import random
from collections import Counter

from vllm.v1.engine.data_parallel.in_flight import InFlight
from vllm.v1.engine.data_parallel.policy import find_standing_cost


def pending(flight: InFlight, hashes: list[int]) -> dict[int, int]:
    told: dict[int, int] = {}
    for units, mask in flight.find_pending(hashes):
        for rank in range(mask.bit_length()):
            if mask >> rank & 1:
                assert rank not in told, "a replica is told twice"
                told[rank] = units
    return told


def test_a_request_counts_until_its_prompt_is_computed_and_until_it_ends() -> None:
    flight = InFlight(1)
    flight.add_replica()
    flight.add("a", 1, [1, 2, 3], 96)
    assert flight.num_requests.tolist() == [0, 1]
    assert flight.standing_costs.tolist() == [0, find_standing_cost(1, 96)]
    assert pending(flight, [1, 2, 9]) == {1: 2}
    assert pending(flight, [5]) == pending(flight, []) == {}
    flight.note_computed("a")
    flight.note_computed("a")
    assert (flight.num_requests[1], flight.standing_costs[1]) == (1, find_standing_cost(1, 0))
    # Others' requests show in what it reports.
    flight.note_reported(1, 3)
    assert (flight.num_requests[1], flight.standing_costs[1]) == (3, find_standing_cost(3, 0))
    flight.note_reported(1, 0)
    assert pending(flight, [1]) == {}
    flight.add("b", 0, list(range(100, 140)), 5, cached_units=20)
    assert pending(flight, list(range(100, 110))) == {}
    assert pending(flight, list(range(100, 135))) == {0: 32}
    assert flight.remove("b") == 0
    assert flight.remove("a") == 1
    assert flight.remove("a") is None
    assert flight.num_requests[1] == 0


def test_any_history_leaves_nothing_behind() -> None:
    rng = random.Random(5)
    flight = InFlight(3)
    alive: dict[str, tuple[int, list[int], int]] = {}
    for number in range(400):
        if rng.random() < 0.5 or not alive:
            # Chains: a hash stands for all before it.
            base = rng.choice([entry[1] for entry in alive.values()] or [[]])
            hashes = base[: rng.randint(0, len(base))]
            hashes = hashes + [number * 100 + i for i in range(rng.randint(1, 30))]
            rank, work = rng.randrange(3), rng.randrange(1, 50)
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
        asked = rng.choice([entry[1] for entry in alive.values()] or [[7]])
        told = pending(flight, asked)
        for rank in range(3):
            mine = [entry for entry in alive.values() if entry[0] == rank]
            assert flight.num_requests[rank] == counts[rank]
            backlog = sum(work for _, _, work in mine)
            assert flight.standing_costs[rank] == find_standing_cost(counts[rank], backlog)
            known = {short for _, hashes, _ in mine for short in hashes}
            shared = next((i for i, h in enumerate(asked) if h not in known), len(asked))
            # As documented: up to 7 units too few, never too many; short ones exactly. An end that
            # is no end of the prompt that asks is not looked for.
            assert shared - 7 <= told.get(rank, 0) <= shared
            if shared <= 8:
                assert told.get(rank, 0) == shared
            exactly = flight.find_shared(rank, asked)
            assert exactly == sorted({*exactly}, reverse=True)
            assert max(exactly, default=0) == shared
    lost = flight.take_all(0)
    assert sorted(lost) == sorted(name for name, entry in alive.items() if entry[0] == 0)
    assert flight.num_requests[0] == 0
