"""What a tenant has on each replica, and that its requests do not gather on one by chance."""

import random
from collections import Counter

from msgspec.structs import replace

from tests.v1.engine.data_parallel.test_router import finish, make_router, request
from vllm.v1.engine.data_parallel.in_flight import InFlight
from vllm.v1.engine.data_parallel.policy import find_standing_cost
from vllm.v1.engine.data_parallel.tenant_loads import TenantLoads


def test_a_tenant_waits_for_its_own_requests_once_for_each_tenant_there() -> None:
    loads = TenantLoads(1)
    loads.add_replica()
    assert loads.find_standing_costs("a").tolist() == [0, 0]
    loads.add("a", 1, 100)
    loads.add("a", 1, 50)
    loads.add("b", 0, 10)
    assert loads.find_standing_costs("a").tolist() == [0, find_standing_cost(2, 150)]
    loads.add("b", 1, 30)
    assert loads.find_standing_costs("a").tolist() == [0, 2 * find_standing_cost(2, 150)]
    one = find_standing_cost(1, 0)
    assert loads.find_standing_costs("b").tolist() == [one + 10, 2 * (one + 30)]
    loads.note_computed("a", 1, 150)
    loads.remove("a", 1)
    assert loads.find_standing_costs("a").tolist() == [0, 2 * one]
    loads.remove("a", 1)
    assert loads.find_standing_costs("b").tolist() == [one + 10, one + 30]
    assert loads.find_standing_costs("a").tolist() == [0, 0]


def test_what_is_in_flight_is_counted_by_tenant_until_it_ends() -> None:
    flight = InFlight(2)
    flight.add("x", 0, [1], 40, tenant="a")
    flight.add("y", 1, [2], 7, tenant="a")
    flight.add("z", 1, [3], 9)
    one = find_standing_cost(1, 0)
    assert flight.tenants.find_standing_costs("a").tolist() == [one + 40, one + 7]
    flight.note_computed("x")
    flight.note_computed("x")
    assert flight.tenants.find_standing_costs("a").tolist() == [one, one + 7]
    flight.remove("x")
    assert flight.take_all(1) == ["y", "z"]
    assert flight.tenants.find_standing_costs("a").tolist() == [0, 0]


def test_requests_of_a_tenant_stay_spread_over_the_replicas() -> None:
    """In a closed loop, where chance alone moves them: a new request for each that ended."""
    rng = random.Random(0)
    router = make_router(2)
    where: dict[str, tuple[str, int]] = {}
    number = 0

    def ask(tenant: str) -> None:
        nonlocal number
        number += 1
        name = f"{tenant}{number}"
        units = [number * 1000 + i for i in range(2 if tenant == "a" else 9)]
        where[name] = tenant, router.route(replace(request(name, units), tenant=tenant))

    for tenant in "abcd" * 8:
        ask(tenant)
    for _ in range(400):
        # A request ends on each replica; two tenants ask again, and by load alone it is all one.
        ended = []
        for rank in range(2):
            tenant = rng.choice([t for t in "abcd" if (t, rank) in where.values()])
            name = next(n for n, place in where.items() if place == (tenant, rank))
            finish(router, name)
            del where[name]
            ended.append(tenant)
        rng.shuffle(ended)
        for tenant in ended:
            ask(tenant)
        placed = Counter(where.values())
        assert min(placed[t, r] for t in "abcd" for r in range(2)) >= 3
