"""The choice of a core from what the cores say and what is in flight."""

import pytest
from msgspec.structs import replace

from vllm.exceptions import EngineCoreLostError, EngineDeadError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.data_parallel.directory import CacheShape
from vllm.v1.engine.data_parallel.router import Router, RouterSettings
from vllm.v1.engine.wire import CoreStatus
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.request_options import RequestOptions

UNIT = 32


def make_router(num_cores: int = 2, **settings) -> Router:
    settings = {"max_num_seqs": 16, "num_blocks": 1000, "tokens_per_block": 32.0} | settings
    return Router(RouterSettings(CacheShape(UNIT, (UNIT,)), num_cores, **settings))


def request(name: str, units: list[int], rank: int | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(
        name,
        [0] * (len(units) * UNIT + 1),
        SamplingParams(),
        0.0,
        options=RequestOptions(data_parallel_rank=rank),
        block_hashes=[bytes(24) + unit.to_bytes(8, "big") for unit in units],
    )


def changes(*stored: int, num_unused: int = 1000) -> CoreStatus:
    return CoreStatus(0, 0, num_unused, stored={0: list(stored)})


def finish(router: Router, name: str) -> None:
    router.take_step([EngineCoreOutput(name, [1], finish_reason=FinishReason.STOP)])


def test_the_cached_prefix_decides_and_turns_are_taken_otherwise() -> None:
    router = make_router()
    router.observe(1, changes(1, 2, 3))
    assert router.route(request("a", [1, 2, 3, 4])) == 1
    assert router.route(request("b", [7, 8])) == 0
    for name in ("a", "b"):
        finish(router, name)
    # Both idle, neither knows it: the one that computed less.
    assert router.route(request("c", [20] * 3)) == 1


def test_front_ends_that_know_nothing_of_each_other_agree_on_a_key() -> None:
    """A burst of requests with a common prefix, spread over server processes."""
    for key in range(20):
        routers = [make_router(4) for _ in range(3)]
        asked = [
            replace(
                request(str(i), [1, 2, 3, 4 + i]), options=RequestOptions(prompt_cache_key=str(key))
            )
            for i in range(9)
        ]
        homes = {routers[i % 3].route(one) for i, one in enumerate(asked)}
        assert len(homes) == 1
        # What is cached elsewhere outweighs it.
        (home,) = homes
        routers[0].observe((home + 1) % 4, changes(1, 2))
        finish(routers[0], "0")
        finish(routers[0], "3")
        finish(routers[0], "6")
        assert routers[0].route(asked[0]) == (home + 1) % 4


def test_a_prefix_in_the_making_draws_its_siblings_until_it_is_computed() -> None:
    router = make_router()
    first = router.route(request("a", list(range(40))))
    assert router.route(request("b", [*range(40), 99])) == first
    router.take_step([EngineCoreOutput("a", [1]), EngineCoreOutput("b", [1])])
    finish(router, "a")
    finish(router, "b")
    # It was never told as stored, so it counts no more.
    assert router.route(request("c", list(range(40)))) == 1 - first


def test_a_prefix_in_the_making_is_foretold_to_where_two_prompts_part() -> None:
    router = make_router()
    router.observe(0, changes(1, 2, 3))
    first = [1, 2, 3, *range(100, 140)]
    assert router.route(request("a", first)) == 0
    # Not to a multiple of some number of units, and no further than the cache serves a prompt.
    router.route(request("b", [*first[:21], 7, 8], 0))
    assert router.foretold("b") == 21 * UNIT
    router.route(request("c", first[:21], 0))
    assert router.foretold("c") == 21 * UNIT
    # Too little to be waited for.
    router.route(request("d", [*first[:6], 9], 0))
    assert router.foretold("d") == 3 * UNIT
    # It has come past where they part: it leaves no place to resume there any more.
    shape = CacheShape(UNIT, (UNIT, 0))
    windows = Router(RouterSettings(shape, 2, 16, 1000, 32.0))
    windows.observe(0, CoreStatus(0, 0, 1000, stored={0: first[:3], 1: [3]}))
    windows.route(request("a", first, 0))
    windows.route(request("b", [*first[:21], 7], 0))
    assert windows.foretold("b") == 21 * UNIT
    windows.observe(0, CoreStatus(1, 0, 1000, stored={0: first[3:23]}, number=1))
    windows.route(request("c", [*first[:21], 8], 0))
    assert windows.foretold("c") == 3 * UNIT
    # Another one, behind it, has not.
    windows.route(request("d", [*first[:30], 5], 0))
    assert windows.foretold("d") == 30 * UNIT


def test_an_overloaded_core_is_left_alone() -> None:
    router = make_router()
    router.observe(0, changes(*range(100)))
    chosen = [router.route(request(str(i), list(range(100)))) for i in range(12)]
    assert chosen[:8] == [0] * 8
    assert chosen[8] == 1


def test_requests_of_other_front_ends_count() -> None:
    router = make_router()
    router.observe(0, CoreStatus(12, 30, 1000, stored={0: [1, 2]}))
    assert router.route(request("a", [1, 2])) == 1


def test_what_a_tier_keeps_draws_less_than_what_the_cache_holds() -> None:
    router = make_router(3)
    units = list(range(1, 33))
    asked = request("a", units)
    # As a tier names them: by another part of the hash.
    asked.block_hashes[:] = [bytes(8) + unit.to_bytes(8, "little") + bytes(16) for unit in units]
    kept = CoreStatus(0, 0, 1000, kept={0: [4, 8, 12], 1: [14]}, kept_step=4 * UNIT)
    router.observe(1, kept)
    assert router.route(asked) == 1
    assert router.foretold("a") == 0
    finish(router, "a")
    router.observe(2, CoreStatus(0, 0, 1000, kept={0: [4, 8, 12], 1: [11]}, kept_step=4 * UNIT))
    assert router.route(asked) == 1
    finish(router, "a")
    router.observe(1, CoreStatus(0, 0, 1000, unkept={1: [14]}, kept_step=4 * UNIT, number=1))
    assert router.route(asked) == 2
    finish(router, "a")
    router.lose(2)
    router.revive(2)
    router.observe(0, CoreStatus(0, 0, 1000, kept={0: [4], 1: [5]}, kept_step=4 * UNIT))
    assert router.route(asked) == 0


def test_a_lost_core_gets_nothing_until_it_is_back() -> None:
    router = make_router()
    router.observe(1, changes(1, 2, 3))
    assert router.route(request("a", [1, 2, 3])) == 1
    assert router.lose(1) == ["a"]
    assert router.living() == [0]
    assert router.route(request("b", [1, 2, 3])) == 0
    with pytest.raises(EngineCoreLostError, match="rank 1 is dead"):
        router.route(request("c", [1], rank=1))
    router.revive(1)
    # What it had cached is forgotten.
    finish(router, "b")
    assert router.route(request("d", [1, 2, 3], rank=1)) == 1
    assert router.end("d") == 1
    assert router.end("d") is None
    router.lose(0)
    router.lose(1)
    with pytest.raises(EngineDeadError, match="Every engine core"):
        router.route(request("e", [1]))


def test_round_robin_looks_at_nothing() -> None:
    router = make_router(3, policy="round-robin")
    router.observe(2, changes(1, 2, 3))
    assert [router.route(request(str(i), [1, 2, 3])) for i in range(4)] == [0, 1, 2, 0]
