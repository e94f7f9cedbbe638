"""Requests that leave nothing: what they computed is found by nobody, and is zeroed if asked."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.core.recurrent_geometry import recurrent_config
from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.window_geometry import GEMMA_LIKE, LLAMA_LIKE, MISTRAL_LIKE, window_config
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request
from vllm.v1.request_options import RequestOptions

PRIVATE = RequestOptions(skip_cache_insert=True)
CONFIGS: dict[str, Callable[[int], Any]] = {
    "v4": lambda blocks: v4_config(32, blocks),
    "recurrent": lambda blocks: recurrent_config(32, blocks),
    "gemma": lambda blocks: window_config(32, blocks, 64, GEMMA_LIKE),
    "llama": lambda blocks: window_config(32, blocks, 64, LLAMA_LIKE),
    "mistral": lambda blocks: window_config(32, blocks, 64, MISTRAL_LIKE),
}
# Blocks of a pool in which few requests find room.
SMALL = {"v4": 260, "recurrent": 130, "gemma": 120, "llama": 70, "mistral": 30}


class Traffic:
    """Conversations, some turns of which are private, in a pool that is too small.

    With ``ends_inside`` these leave a beginning, up to a place in their prompt.
    """

    def __init__(
        self, driver: Driver, seed: int, private_share: float = 0.5, *, ends_inside: bool = False
    ) -> None:
        self.ends_inside = ends_inside
        self.driver, self.rng = driver, random.Random(seed)
        self.private: list[Request] = []
        self.public: list[Request] = []
        self.share = private_share

    def run(self, num_requests: int) -> None:
        rng, driver = self.rng, self.driver
        prompts: list[list[int]] = []
        for _ in range(num_requests):
            base = rng.choice(prompts[-6:])[: rng.randrange(1, 900)] if prompts else []
            prompt = base + [rng.randrange(5, 90) for _ in range(rng.choice((3, 60, 400)))]
            prompts.append(prompt[:900])
            is_private = rng.random() < self.share
            options = PRIVATE if is_private else RequestOptions()
            if is_private and self.ends_inside:
                end = rng.randrange(len(prompts[-1]) + 1)
                marks = [end] if end else []
                options = RequestOptions(cache_insert_end=end, cache_boundaries=marks)
            request = driver.add(prompts[-1], rng.choice((1, 8, 60)), options=options)
            (self.private if is_private else self.public).append(request)
            for _ in range(rng.randrange(3)):
                driver.step()
            if driver.running and rng.random() < 0.1:
                driver.finish(rng.choice(driver.running))  # a client that leaves
        driver.run_all()

    def own_hashes(self, unit: int = 32) -> set[bytes]:
        """Hashes of what private requests may not leave, and others have not left."""
        public = {h for request in self.public for h in request.block_hashes}
        hidden: set[bytes] = set()
        for request in self.private:
            first = request.insert_end // unit if self.ends_inside else 0
            public.update(request.block_hashes[:first])
            hidden.update(request.block_hashes[first:])
        return hidden - public


@pytest.mark.parametrize("ends_inside", [False, True], ids=["nothing", "a beginning"])
@pytest.mark.parametrize("name", ["v4", "recurrent", "llama", "mistral"])
def test_nothing_of_them_is_in_the_index_or_was_announced(name: str, ends_inside: bool) -> None:
    driver = Driver(CONFIGS[name](SMALL[name]), 1024, seed=4)
    traffic = Traffic(driver, seed=4, ends_inside=ends_inside)
    seen: set[Any] = set()
    check = driver.check

    def check_and_look() -> None:
        check()
        seen.update(key for _, key in driver.announced)
        index = driver.coordinator.index
        seen.update(index.checkpoints)
        seen.update(h for keys in index.keys.values() for h in keys)

    driver.check = check_and_look  # type: ignore[method-assign]
    traffic.run(60)
    own = traffic.own_hashes()
    assert len(own) > 50
    assert not own & seen
    assert not {maybe_convert_block_hash(h) for h in own} & seen  # type: ignore[arg-type]
    assert driver.num_preemptions
    # They read what others left.
    assert any(driver.hits[request.request_id] for request in traffic.private)
    assert not driver.coordinator.requests


@pytest.mark.parametrize("name", ["v4", "recurrent", "llama"])
def test_public_requests_hit_as_if_private_ones_were_not_there(name: str) -> None:
    """In a pool with room for all, one after the other."""
    hits: list[dict[str, int]] = []
    for options in (PRIVATE, None):
        driver = Driver(CONFIGS[name](3000), 1024, seed=1)
        rng = random.Random(9)
        found: dict[str, int] = {}
        prompts = [[rng.randrange(5, 90) for _ in range(700)] for _ in range(3)]
        for i in range(6):
            prompt = prompts[i % 3][: rng.randrange(100, 700)] + [rng.randrange(90) for _ in "abc"]
            own = [rng.randrange(90) for _ in range(300)]
            if options is not None:
                driver.add(prompt + own, options=options)
                driver.run_all()
            request = driver.add(prompt, 3)
            driver.run_all()
            found[str(i)] = driver.hits[request.request_id]
        hits.append(found)
    assert hits[0] == hits[1]
    assert sum(hits[0].values())


@pytest.mark.parametrize("name", ["v4", "llama", "mistral"])
@pytest.mark.parametrize("end", [20, 300])
def test_a_beginning_is_left_up_to_its_mark(name: str, end: int) -> None:
    """Down to a place at which a prompt can resume, in whole steps and in chunks."""
    for budget in (1024, 160):
        driver = Driver(CONFIGS[name](3000), 1024, seed=1)
        tokens = [random.Random(3).randrange(5, 90) for _ in range(700)]
        marks = [end] if end else []
        options = RequestOptions(cache_insert_end=end, cache_boundaries=marks)
        driver.add(tokens, 40, options=options)
        while driver.running or driver.waiting:
            driver.step(budget)
        again = driver.add(tokens, 3)
        driver.run_all()
        lean = driver.coordinator.geometry.lean
        assert end // lean * lean <= driver.hits[again.request_id] <= end


def test_equal_prompts_that_come_together_do_not_wait_for_each_other() -> None:
    tokens = [random.Random(3).randrange(5, 90) for _ in range(900)]
    public = RequestOptions()
    for first, second, waits in (
        (public, public, True),
        (PRIVATE, public, False),
        (public, PRIVATE, False),
    ):
        driver = Driver(v4_config(32, 3000), 1024, seed=1)
        driver.add(tokens, options=first)
        driver.step(256)
        other = driver.add(tokens, options=second)
        manager = driver.manager
        assert manager.should_wait(other, manager.look_up(other)) is waits


@pytest.mark.parametrize("name", ["v4", "recurrent", "llama", "mistral"])
def test_their_blocks_are_zeroed_and_nobody_elses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SCRUB_UNCACHED", "1")
    driver = Driver(CONFIGS[name](SMALL[name]), 1024, seed=2)
    manager, memory = driver.manager, driver.memory
    take, zeroed = manager.take_step_work, set[int]()

    def take_and_zero() -> Any:
        work = take()
        for block_id in work.new_block_ids or ():
            # As the worker does: before copies and before anything is computed.
            memory._blocks.pop(block_id, None)
            zeroed.add(block_id)
        return work

    manager.take_step_work = take_and_zero  # type: ignore[method-assign]
    traffic = Traffic(driver, seed=2)
    # The driver reads every row that a step needs: one that was zeroed too many would be missed.
    traffic.run(30)
    take_and_zero()
    assert zeroed
    assert driver.num_preemptions
    public = {tag for request in traffic.public for tag in driver.tags[request.request_id]}
    private = {tag for request in traffic.private for tag in driver.tags[request.request_id]}
    left = {tag for _, rows in memory._blocks.values() for tag in rows.values()}
    assert not left & (private - public)
