import random
from types import SimpleNamespace

import pytest

from vllm.config import SchedulerConfig
from vllm.exceptions import ConfigError
from vllm.v1.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    compute_mm_encoder_budget,
)

ANY = 10**9


class FakeRequest:
    """What the managers ask of a request: identifiers and sizes."""

    def __init__(self, request_id, *items):
        self.request_id = request_id
        self.mm_features = [SimpleNamespace(identifier=name) for name, _ in items]
        self.sizes = [size for _, size in items]

    def get_num_encoder_embeds(self, input_id):
        return self.sizes[input_id]


def check(manager, sizes):
    """The counts follow from who holds what."""
    used = sum(sizes[name] for name in manager.cached)
    assert manager.num_free_slots == manager.cache_size - used
    assert manager.num_freeable_slots == manager.num_free_slots + sum(manager.freeable.values())
    assert {name for name, users in manager.cached.items() if not users} == set(manager.freeable)


def test_allocate_and_reuse():
    manager, request = EncoderCacheManager(10), FakeRequest("r1", ("a", 4))
    assert not manager.check_and_update_cache(request, 0)
    assert manager.can_allocate(request, 0, ANY, 0)
    manager.allocate(request, 0)
    assert manager.cached == {"a": {"r1"}}
    assert manager.check_and_update_cache(request, 0)
    other = FakeRequest("r2", ("a", 4))
    assert manager.check_and_update_cache(other, 0)
    assert manager.cached == {"a": {"r1", "r2"}}
    assert (manager.num_free_slots, manager.num_freeable_slots) == (6, 6)
    assert manager.request_cached_ids == {"r1": {0}, "r2": {0}}


def test_last_user_makes_it_freeable():
    manager = EncoderCacheManager(10)
    one, two = FakeRequest("r1", ("a", 4)), FakeRequest("r2", ("a", 4))
    manager.allocate(one, 0)
    manager.check_and_update_cache(two, 0)
    manager.free_encoder_input(one, 0)
    assert manager.freeable == {}
    manager.free_encoder_input(two, 0)
    assert manager.freeable == {"a": 4}
    assert manager.cached == {"a": set()}
    assert (manager.num_free_slots, manager.num_freeable_slots) == (6, 10)
    manager.free_encoder_input(two, 0)  # again: nothing happens
    assert manager.num_freeable_slots == 10


def test_freeable_output_is_reused():
    manager, request = EncoderCacheManager(10), FakeRequest("r", ("a", 4))
    manager.allocate(request, 0)
    manager.free_encoder_input(request, 0)
    assert manager.check_and_update_cache(request, 0)
    assert manager.freeable == {}
    assert manager.num_freeable_slots == 6
    assert manager.cached == {"a": {"r"}}


def test_oldest_freeable_is_evicted():
    manager = EncoderCacheManager(10)
    old = FakeRequest("r1", ("a", 3), ("b", 3), ("c", 3))
    for i in (0, 1, 2):
        manager.allocate(old, i)
    for i in (1, 0, 2):
        manager.free_encoder_input(old, i)
    new = FakeRequest("r2", ("d", 6))
    assert manager.can_allocate(new, 0, ANY, 0)
    assert manager.get_freed_mm_hashes() == ["b", "a"]
    assert manager.get_freed_mm_hashes() == []
    manager.allocate(new, 0)
    assert set(manager.cached) == {"c", "d"}
    check(manager, {"c": 3, "d": 6})


def test_nothing_is_evicted_in_vain():
    manager = EncoderCacheManager(10)
    held, idle = FakeRequest("r1", ("a", 6)), FakeRequest("r2", ("b", 2))
    manager.allocate(held, 0)
    manager.allocate(idle, 0)
    manager.free(idle)
    assert not manager.can_allocate(FakeRequest("r3", ("c", 5)), 0, ANY, 0)
    assert manager.get_freed_mm_hashes() == []
    assert "b" in manager.cached


def test_promised_room_counts():
    manager, request = EncoderCacheManager(10), FakeRequest("r", ("a", 5), ("b", 6))
    assert manager.can_allocate(request, 0, ANY, 5)
    assert not manager.can_allocate(request, 1, ANY, 5)


def test_compute_budget():
    manager, request = EncoderCacheManager(10), FakeRequest("r", ("a", 5))
    assert not manager.can_allocate(request, 0, 4, 0)
    assert manager.can_allocate(request, 0, 5, 0)


def test_held_items_and_free():
    manager = EncoderCacheManager(10)
    request = FakeRequest("r", ("m", 2), ("n", 4), ("o", 3))
    manager.allocate(request, 0)
    manager.allocate(request, 2)
    assert manager.get_cached_input_ids(request) == {0, 2}
    manager.free(request)
    assert manager.get_cached_input_ids(request) == set()
    assert manager.freeable == {"m": 2, "o": 3}
    assert manager.request_cached_ids == {}


def test_same_item_twice_in_a_prompt():
    manager, request = EncoderCacheManager(10), FakeRequest("r", ("a", 4), ("a", 4))
    manager.allocate(request, 0)
    assert manager.check_and_update_cache(request, 1)
    manager.free_encoder_input(request, 0)
    assert manager.freeable == {}
    manager.free_encoder_input(request, 1)
    assert manager.freeable == {"a": 4}


def test_allocating_twice_is_our_bug():
    manager, request = EncoderCacheManager(10), FakeRequest("r", ("a", 4))
    manager.allocate(request, 0)
    with pytest.raises(AssertionError, match="cached already"):
        manager.allocate(request, 0)
    with pytest.raises(AssertionError, match="needs 7 slots, 6 are free"):
        manager.allocate(FakeRequest("s", ("b", 7)), 0)


def test_reset():
    manager, request = EncoderCacheManager(10), FakeRequest("r", ("a", 4), ("b", 1))
    manager.allocate(request, 0)
    manager.allocate(request, 1)
    manager.free_encoder_input(request, 0)
    manager.reset()
    assert (manager.cached, manager.freeable, manager.freed) == ({}, {}, [])
    assert manager.request_cached_ids == {}
    assert manager.num_free_slots == manager.num_freeable_slots == 10


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic(seed):
    """Whatever happens, the counts agree with the tables."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 6) for name in "abcdef"}
    manager = EncoderCacheManager(12)
    requests = [
        FakeRequest(f"r{i}", *((n, sizes[n]) for n in rng.choices("abcdef", k=3))) for i in range(5)
    ]
    for _ in range(150):
        request, i = rng.choice(requests), rng.randrange(3)
        if rng.random() < 0.4:
            manager.free_encoder_input(request, i)
        elif not manager.check_and_update_cache(request, i) and manager.can_allocate(
            request, i, ANY, 0
        ):
            manager.allocate(request, i)
        check(manager, sizes)
    for request in requests:
        manager.free(request)
    check(manager, sizes)
    assert manager.num_freeable_slots == 12


class TestEncoderDecoder:
    def test_room(self):
        manager, request = EncoderDecoderCacheManager(10), FakeRequest("r", ("a", 6), ("b", 5))
        assert not manager.check_and_update_cache(request, 0)
        assert manager.can_allocate(request, 0, ANY, 0)
        assert not manager.can_allocate(request, 0, 5, 0)
        manager.allocate(request, 0)
        assert not manager.check_and_update_cache(request, 0)
        assert manager.num_free_slots == 4
        assert not manager.can_allocate(request, 1, ANY, 0)
        assert manager.get_cached_input_ids(request) == {0, 1}
        manager.free_encoder_input(request, 0)
        assert manager.num_free_slots == 10

    def test_outputs_are_dropped_a_step_later(self):
        manager, request = EncoderDecoderCacheManager(10), FakeRequest("r", ("a", 6))
        manager.allocate(request, 0)
        assert manager.allocated == ["a"]
        assert manager.get_freed_mm_hashes() == []
        assert (manager.allocated, manager.to_free) == ([], ["a"])
        assert manager.get_freed_mm_hashes() == ["a"]
        assert manager.get_freed_mm_hashes() == []

    def test_free_and_reset(self):
        manager, request = EncoderDecoderCacheManager(10), FakeRequest("r", ("a", 6), ("b", 2))
        manager.allocate(request, 0)
        manager.allocate(request, 1)
        manager.free(request)
        assert manager.num_free_slots == 10
        manager.allocate(request, 0)
        manager.reset()
        assert (manager.allocated, manager.to_free, manager.num_free_slots) == ([], [], 10)


class TestBudget:
    def config(self, batched, **kw):
        return SchedulerConfig(max_num_batched_tokens=batched, max_num_seqs=1, **kw)

    @pytest.mark.parametrize(
        ("batched", "sizes", "expected"),
        [
            (2048, {}, (0, 0)),
            (2048, {"image": 576}, (2048, 2048)),
            (100, {"image": 576, "audio": 50}, (576, 576)),
        ],
    )
    def test_budget(self, batched, sizes, expected):
        assert compute_mm_encoder_budget(self.config(batched), sizes) == expected

    def test_items_that_may_not_be_chunked(self):
        config = self.config(100, disable_chunked_mm_input=True)
        with pytest.raises(ConfigError, match="image item takes up to 576"):
            compute_mm_encoder_budget(config, {"image": 576})
        assert compute_mm_encoder_budget(config, {"image": 100}) == (100, 100)
