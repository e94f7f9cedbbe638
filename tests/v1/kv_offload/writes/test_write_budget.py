from vllm.v1.kv_offload.writes.write_budget import WriteBudget

DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_days_bytes_come_back_evenly():
    clock = Clock()
    budget = WriteBudget(1000, clock)
    assert budget.allows(1000)
    assert not budget.allows(1001)
    budget.spend(400)
    assert not budget.is_scarce
    budget.spend(500)
    assert budget.is_scarce
    assert not budget.allows(101)
    clock.now += DAY / 4
    assert budget.allows(350)
    assert not budget.allows(351)
    clock.now += 10 * DAY
    assert not budget.allows(1001)


def test_without_a_limit_anything_goes():
    budget = WriteBudget(None, Clock())
    budget.spend(1 << 50)
    assert budget.allows(1 << 60)
    assert not budget.is_scarce


def test_a_restart_renews_nothing_and_a_clock_that_is_set_gives_nothing():
    clock, unix = Clock(), Clock()
    first = WriteBudget(1000, clock, unix)
    first.spend(900)
    unix.now += 30 * DAY
    assert not first.allows(101)
    kept = first.to_json()
    unix.now += DAY / 10
    second = WriteBudget(1000, clock, unix)
    second.resume(kept)
    assert second.allows(200)
    assert not second.allows(201)
    unix.now -= 100 * DAY
    third = WriteBudget(1000, clock, unix)
    third.resume(kept)
    assert third.allows(100)
    assert not third.allows(101)
    clock.now += DAY / 10
    assert third.allows(200)
    assert not third.allows(201)
    for text in ("", "[]", "{}", '{"left": -1, "at": 0}', '{"left": "x", "at": 0}'):
        fresh = WriteBudget(1000, clock, unix)
        fresh.resume(text)
        assert fresh.allows(1000)
    # A limit that was lowered meanwhile holds.
    smaller = WriteBudget(50, clock, unix)
    smaller.resume(kept)
    assert not smaller.allows(51)
