"""Claims of waiting requests: which blocks go last, who gives way, and that nobody is kept out."""

from tests.v1.core.prefix.unit_caches import UnitCache, h, make_cache
from tests.v1.core.sched.builders import answer, make_request, make_v4_scheduler
from vllm.v1.core.invariants import check_pool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

UNIT = 32


def keyed_cache(names: str) -> tuple[UnitCache, list[KVCacheBlock]]:
    """Return a pool whose blocks all are free and hold a key each, the first used longest ago."""
    cache = make_cache(len(names) + 1, [0])
    blocks = cache.pool.get_new_blocks(len(names))
    for name, block in zip(names, blocks, strict=True):
        cache.add_key(block, 0, h(name))
    cache.pool.free_blocks(blocks)
    return cache, blocks


def names_of(cache: UnitCache) -> str:
    """Return what is still cached."""
    return "".join(sorted(key.decode() for key in cache.index.keys[0]))


def test_what_is_claimed_goes_last_and_the_last_claim_first() -> None:
    cache, (a, b, c, d, *_) = keyed_cache("abcdef")
    claims = cache.pool.claims
    claims.claim("first", (a, b))
    claims.claim("second", (b, c, d))
    assert cache.tiers(a, b, c, d) == [Tier.CLAIMED] * 4
    check_pool(cache.pool, ())
    held = cache.pool.get_new_blocks(2)
    assert names_of(cache) == "abcd"
    # One block too many: the claim that came last is given up, but for what the first has too.
    held += cache.pool.get_new_blocks(1)
    assert (names_of(cache), "first" in claims, "second" in claims) == ("abd", True, False)
    assert cache.tiers(a, b, d) == [Tier.CLAIMED, Tier.CLAIMED, Tier.REGULAR]
    check_pool(cache.pool, held)
    # Claims keep nobody from running: all there is can be had.
    held += cache.pool.get_new_blocks(3)
    assert (names_of(cache), len(claims)) == ("", 0)
    check_pool(cache.pool, held)


def test_what_is_held_stays_claimed_when_it_is_given_back() -> None:
    cache, (a, b, c) = keyed_cache("abc")
    claims = cache.pool.claims
    cache.pool.touch((a, b))
    claims.claim("waits", (a, b))
    cache.pool.free_blocks((a,))
    assert cache.tiers(a, b, c) == [Tier.CLAIMED, None, Tier.REGULAR]
    check_pool(cache.pool, (b,))
    claims.release("waits")
    claims.release("waits")
    cache.pool.free_blocks((b,))
    assert cache.tiers(a, b, c) == [Tier.REGULAR] * 3
    check_pool(cache.pool, ())


def test_a_claim_ends_with_what_it_is_of() -> None:
    cache, (a, b, c) = keyed_cache("abc")
    claims = cache.pool.claims
    claims.claim("waits", (a, b))
    cache.pool.evict_blocks([a.block_id])
    assert (len(claims), cache.tiers(a, b)) == (0, [Tier.SCRATCH, Tier.REGULAR])
    check_pool(cache.pool, ())
    # Pins go after claims; a block that is both is pinned.
    cache.pool.enable_pinning(1)
    assert cache.pool.pins is not None
    claims.claim("waits", (b, c))
    cache.pool.pins.pin({"held": (c,)})
    assert cache.tiers(b, c) == [Tier.CLAIMED, Tier.PINNED]
    check_pool(cache.pool, ())
    held = cache.pool.get_new_blocks(2)
    assert (names_of(cache), len(claims)) == ("c", 0)
    check_pool(cache.pool, held)
    cache.pool.free_blocks(held)
    claims.claim("again", (c,))
    assert cache.pool.reset_prefix_cache()
    assert (len(claims), cache.tiers(c)) == (0, [Tier.SCRATCH])


def test_a_free_block_whose_key_another_took_over_is_claimed_no_more() -> None:
    cache = make_cache(4, [0], ranks=True)
    old, other = cache.pool.get_new_blocks(2)
    cache.add_key(old, 0, h("a"))
    cache.pool.free_blocks((old,))
    cache.pool.claims.claim("waits", (old,))
    emptied = cache.index.add_keys((other,), 0, (h("a"),), (None,))
    cache.pool.replace_emptied(emptied)
    assert cache.tiers(old) == [Tier.SCRATCH]
    assert not cache.pool.claims.holds(old)
    check_pool(cache.pool, (other,))


# ---- in a scheduler ----------------------------------------------------------------------------


def run_step(scheduler: Scheduler) -> dict[str, int]:
    """Run a step; return the hits of those that it admitted."""
    output = scheduler.schedule()
    scheduler.kv_cache_manager.check_invariants()
    tokens = {
        name: [7]
        for name in output.num_scheduled_tokens
        if not scheduler.requests[name].is_prefill_chunk
    }
    hits = {}
    for bundle in scheduler.update_from_output(output, answer(output, tokens)).values():
        for item in bundle.outputs:
            if item.prefill_stats is not None:
                hits[item.request_id] = item.prefill_stats.num_cached_tokens
    return hits


def run_all(scheduler: Scheduler) -> dict[str, int]:
    hits: dict[str, int] = {}
    while scheduler.has_unfinished_requests():
        hits |= run_step(scheduler)
    return hits


def add(scheduler: Scheduler, name: str, first: int, length: int, max_tokens: int = 1) -> None:
    prompt = range(first, first + length)
    scheduler.add_request(make_request(name, prompt, max_tokens, block_size=UNIT))


def test_who_waits_hits_what_was_there_when_it_came() -> None:
    """A running answer and a prompt before it need blocks: they take what nobody waits for."""
    scheduler = make_v4_scheduler(170, UNIT, max_num_seqs=1, max_model_len=2048)
    for name, first in (("wanted", 0), ("unwanted", 100_000), ("unwanted too", 200_000)):
        add(scheduler, name, first, 1000)
        run_all(scheduler)
    add(scheduler, "runs", 20_000, 1000, max_tokens=4)
    run_step(scheduler)
    add(scheduler, "before", 30_000, 1900)
    add(scheduler, "wanted again", 0, 1000)
    asks = make_request("asks", range(1000), block_size=UNIT)
    foretold = scheduler.kv_cache_manager.look_up(asks).num_tokens
    assert foretold == 896
    assert run_all(scheduler) == {"before": 0, "wanted again": foretold}
    assert not scheduler.kv_cache_manager.block_pool.claims


def test_a_claim_ends_with_its_request() -> None:
    scheduler = make_v4_scheduler(170, UNIT, max_num_seqs=1, max_model_len=2048)
    claims = scheduler.kv_cache_manager.block_pool.claims
    add(scheduler, "made", 0, 700)
    # Nobody is before it: it claims nothing.
    assert not claims
    run_all(scheduler)
    add(scheduler, "runs", 90_000, 1900, max_tokens=4)
    run_step(scheduler)
    for name in ("waits", "waits too"):
        add(scheduler, name, 0, 700)
    assert len(claims) == 2
    scheduler.finish_requests("waits", RequestStatus.FINISHED_ABORTED)
    assert ("waits" in claims, "waits too" in claims) == (False, True)
    assert run_all(scheduler) == {"waits too": 672}
    assert not claims
