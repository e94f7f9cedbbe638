"""Requests that leave spare prefixes: theirs go before what others left, and are hit until then."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.v1.core.recurrent_geometry import recurrent_config
from tests.v1.core.unit_cache_driver import Driver
from tests.v1.core.v4_geometry import v4_config
from tests.v1.core.window_geometry import GEMMA_LIKE, LLAMA_LIKE, MISTRAL_LIKE, window_config
from vllm.v1.core.retention.standing import CheckpointStanding
from vllm.v1.core.retention.tiers import Tier
from vllm.v1.request_options import RequestOptions

SPARE, PUBLIC = RequestOptions(is_spare=True), RequestOptions()
CONFIGS: dict[str, Callable[[int], Any]] = {
    "v4": lambda blocks: v4_config(32, blocks),
    "recurrent": lambda blocks: recurrent_config(32, blocks),
    "gemma": lambda blocks: window_config(32, blocks, 64, GEMMA_LIKE),
    "llama": lambda blocks: window_config(32, blocks, 64, LLAMA_LIKE),
    "mistral": lambda blocks: window_config(32, blocks, 64, MISTRAL_LIKE),
}
# Blocks in which three chats fit, and few texts beside them.
SMALL = {"v4": 500, "recurrent": 220, "gemma": 260, "llama": 130, "mistral": 60}


def text_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 90) for _ in range(length)]


def chat_hits(name: str, options: RequestOptions | None, num_texts: int = 40) -> int:
    """Tokens that the second turns of three chats hit, with a job between the turns."""
    driver = Driver(CONFIGS[name](SMALL[name]), 1024, seed=1)
    chats = [text_of(seed, 700) for seed in range(3)]
    for chat in chats:
        driver.add(chat, 8)
        driver.run_all()
    for seed in range(num_texts if options is not None else 0):
        driver.add(text_of(1000 + seed, 200), 1, options=options)
        driver.run_all()
    found = 0
    for chat in chats:
        request = driver.add(chat + text_of(5, 20), 8)
        driver.run_all()
        found += driver.hits[request.request_id]
    return found


@pytest.mark.parametrize("name", ["v4", "recurrent", "llama"])
def test_a_job_that_indexes_drives_no_chat_out(name: str) -> None:
    alone, beside_job = chat_hits(name, None), chat_hits(name, SPARE)
    assert alone >= 3 * 640
    assert beside_job >= 0.99 * alone
    # The same texts without it do.
    assert chat_hits(name, PUBLIC) < 0.5 * alone


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_they_leave_is_hit(name: str) -> None:
    driver = Driver(CONFIGS[name](3000), 1024, seed=1)
    text = text_of(1, 300)
    driver.add(text, 1, options=SPARE)
    driver.run_all()
    again = driver.add(text, 1, options=SPARE)
    driver.run_all()
    assert driver.hits[again.request_id] == 288
    chat = driver.add(text + text_of(2, 30), 5)
    driver.run_all()
    assert driver.hits[chat.request_id] >= 288


@pytest.mark.parametrize("name", ["v4", "recurrent", "llama"])
def test_a_chat_that_hits_it_makes_it_its_own(name: str) -> None:
    """And a text that hits a chat's prefix leaves it the chat's."""
    driver = Driver(CONFIGS[name](SMALL[name]), 1024, seed=1)
    text = text_of(1, 600)
    driver.add(text, 1, options=SPARE)
    driver.run_all()
    for more in (text_of(2, 30), text_of(3, 40)):
        driver.add(text + more, 5)
        driver.run_all()
        driver.add(text[:320] + text_of(4, 40), 1, options=SPARE)
        driver.run_all()
    for seed in range(25):
        driver.add(text_of(2000 + seed, 200), 1, options=SPARE)
        driver.run_all()
    chat = driver.add(text + text_of(2, 30), 5)
    driver.run_all()
    assert driver.hits[chat.request_id] >= 576


@pytest.mark.parametrize("name", ["llama", "gemma", "v4"])
def test_their_blocks_stand_below_the_regular_ones(name: str) -> None:
    driver = Driver(CONFIGS[name](3000), 1024, seed=1)
    driver.add(text_of(1, 300), 1, options=SPARE)
    driver.run_all()
    pool, index = driver.coordinator.block_pool, driver.coordinator.index
    keyed = [block for block in pool.blocks if block.key is not None]
    assert keyed
    assert {pool.tier_of(block) for block in keyed} == {Tier.SPARE}
    assert {r.standing for r in index.checkpoints.values()} <= {CheckpointStanding.SPARE}
    driver.add(text_of(1, 300), 4)
    driver.run_all()
    first = index.keys[keyed[0].group_id][keyed[0].key]
    assert pool.tier_of(first) is Tier.REGULAR


@pytest.mark.parametrize("name", list(CONFIGS))
def test_mixed_traffic_keeps_the_cache_sound(name: str) -> None:
    """The driver checks every invariant after every step, and every row that is read."""
    driver = Driver(CONFIGS[name](SMALL[name] // 2), 1024, seed=1)
    rng = random.Random(1)
    prompts: list[list[int]] = []
    for _ in range(25):
        base = rng.choice(prompts[-6:])[: rng.randrange(1, 500)] if prompts else []
        prompt = base + [rng.randrange(5, 90) for _ in range(rng.choice((3, 60, 300)))]
        prompts.append(prompt[:600])
        options = SPARE if rng.random() < 0.5 else PUBLIC
        driver.add(prompts[-1], rng.choice((1, 8, 40)), options=options)
        for _ in range(rng.randrange(3)):
            driver.step()
        if driver.running and rng.random() < 0.1:
            driver.finish(rng.choice(driver.running))
        if rng.random() < 0.03:
            driver.run_all()
            assert driver.manager.reset_prefix_cache()
    driver.run_all()
    assert sum(driver.hits.values())
