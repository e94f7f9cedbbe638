import pytest

from vllm.v1.core.kv_cache_metrics import BlockMetricsState, KVCacheMetricsCollector
from vllm.v1.core.values.free_block_queue import KVCacheBlock


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that tests set."""

    class Clock:
        seconds = 0.0

    monkeypatch.setattr("time.monotonic_ns", lambda: int(Clock.seconds * 1e9))
    return Clock


class TestState:
    def test_fresh(self, clock):
        clock.seconds = 5
        state = BlockMetricsState()
        assert state.birth_time_ns == state.last_access_ns == 5_000_000_000
        assert len(state.access_history) == 0
        assert state.get_reuse_gaps_seconds() == []

    def test_times(self, clock):
        state = BlockMetricsState()
        clock.seconds = 2
        state.record_access()
        clock.seconds = 5
        assert state.get_lifetime_seconds() == 5
        assert state.get_idle_time_seconds() == 3
        assert state.get_reuse_gaps_seconds() == []

    def test_history_is_bounded(self, clock):
        state = BlockMetricsState()
        for seconds in (1, 2, 4, 7, 11, 16):
            clock.seconds = seconds
            state.record_access()
        assert state.access_history.maxlen == 4
        assert list(state.access_history) == [4e9, 7e9, 11e9, 16e9]
        assert state.get_reuse_gaps_seconds() == [3, 4, 5]


class TestCollector:
    @pytest.mark.parametrize("rate", [0, -0.1, 1.1])
    def test_rate(self, rate):
        with pytest.raises(AssertionError, match="sample_rate"):
            KVCacheMetricsCollector(sample_rate=rate)

    def test_sampling(self, monkeypatch):
        collector = KVCacheMetricsCollector(0.25)
        monkeypatch.setattr("random.random", lambda: 0.249)
        assert collector.should_sample_block()
        monkeypatch.setattr("random.random", lambda: 0.25)
        assert not collector.should_sample_block()
        assert all(KVCacheMetricsCollector(1.0).should_sample_block() for _ in range(50))

    def test_life_of_a_block(self, clock):
        collector, block = KVCacheMetricsCollector(1.0), KVCacheBlock(4)
        collector.on_block_allocated(block)
        for seconds in (1, 3):
            clock.seconds = seconds
            collector.on_block_accessed(block)
        clock.seconds = 10
        collector.on_block_evicted(block)
        [event] = collector.drain_events()
        assert (event.lifetime_seconds, event.idle_seconds) == (10, 7)
        assert event.reuse_gaps_seconds == (2,)
        assert collector.drain_events() == []
        assert collector.block_metrics == {}

    def test_unsampled_blocks(self, monkeypatch):
        collector, block = KVCacheMetricsCollector(0.5), KVCacheBlock(4)
        monkeypatch.setattr("random.random", lambda: 0.9)
        collector.on_block_allocated(block)
        collector.on_block_accessed(block)
        collector.on_block_evicted(block)
        assert collector.block_metrics == {}
        assert collector.drain_events() == []

    def test_reset(self):
        collector = KVCacheMetricsCollector(1.0)
        for i in range(3):
            collector.on_block_allocated(KVCacheBlock(i))
        collector.on_block_evicted(KVCacheBlock(0))
        assert set(collector.block_metrics) == {1, 2}
        collector.reset()
        assert collector.block_metrics == {}
        assert collector.drain_events() == []

    def test_reallocation_starts_anew(self, clock):
        collector, block = KVCacheMetricsCollector(1.0), KVCacheBlock(0)
        collector.on_block_allocated(block)
        clock.seconds = 4
        collector.on_block_evicted(block)
        collector.on_block_allocated(block)
        clock.seconds = 5
        collector.on_block_evicted(block)
        assert [event.lifetime_seconds for event in collector.drain_events()] == [4, 1]
