from vllm.utils.liveness import Effort, beat_interval_s
from vllm.v1.engine.core_loop import Progress
from vllm.v1.engine.heartbeat import HeartbeatMonitor, Pulse
from vllm.v1.engine.wire import Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_several_beats_fit_in_a_timeout():
    assert beat_interval_s(30) == 1.0
    assert beat_interval_s(0.8) == 0.1


def test_silence_is_death():
    clock = Clock()
    monitor = HeartbeatMonitor(30, clock)
    clock.now = 29
    assert monitor.find_fault() is None
    monitor.saw_beat(Heartbeat(1, False))
    clock.now = 58
    assert monitor.find_fault() is None
    clock.now = 60
    assert "no heartbeat for 30 s" in (monitor.find_fault() or "")


def test_beats_without_progress_are_death_only_with_work_pending():
    clock = Clock()
    busy, idle = HeartbeatMonitor(30, clock), HeartbeatMonitor(30, clock)
    for clock.now in range(32):
        busy.saw_beat(Heartbeat(5, True))
        idle.saw_beat(Heartbeat(5, False))
    assert "no progress for 30 s" in (busy.find_fault() or "")
    assert idle.find_fault() is None


def test_progress_and_outputs_are_life():
    clock = Clock()
    beats, outputs = HeartbeatMonitor(30, clock), HeartbeatMonitor(30, clock)
    for clock.now in range(100):
        beats.saw_beat(Heartbeat(clock.now // 20, True))
        outputs.saw_beat(Heartbeat(5, True))
        if clock.now % 20 == 0:
            outputs.saw_message()
    assert beats.find_fault() is None
    assert outputs.find_fault() is None


class Work(Clock):
    """Of a loop's thread, which uses and awaits a core for some share of the time."""

    def __init__(self, used: float, queued: float = 0.0) -> None:
        super().__init__()
        self.used, self.queued = used, queued

    def spent(self) -> Effort:
        return Effort(self.now * self.used, self.now * self.queued)


def changes(pulse: Pulse, clock: Clock, work: Work, seconds: int) -> int:
    """Let time pass without progress; return how often the beat changed."""
    seen = set()
    for _ in range(seconds):
        clock.now += 1
        work.now += 1
        seen.add(pulse.take_beat().progress)
    return len(seen) - 1


def test_a_long_step_that_computes_counts_as_progress_for_a_while():
    clock, work, progress = Clock(), Work(0.9), Progress()
    progress.tick()
    pulse = Pulse(progress, 30, clock, work.spent)
    assert changes(pulse, clock, work, 110) > 100
    # A loop that never ends is found in the end.
    assert changes(pulse, clock, work, 60) <= 20
    progress.tick()
    assert changes(pulse, clock, work, 10) > 5


def test_a_step_that_waits_makes_no_progress():
    clock, work, progress = Clock(), Work(0.01, 0.02), Progress()
    progress.tick()
    pulse = Pulse(progress, 30, clock, work.spent)
    assert changes(pulse, clock, work, 40) == 0


def test_a_step_that_has_no_core_is_no_hang_however_long():
    clock, work, progress = Clock(), Work(0.01, 0.95), Progress()
    progress.tick()
    pulse = Pulse(progress, 30, clock, work.spent)
    assert changes(pulse, clock, work, 1000) == 999
    # Several threads that wait for one core excuse no more than the time that passed.
    clock, work = Clock(), Work(0.9, 0.0)
    pulse = Pulse(progress, 30, clock, lambda: Effort(work.now * 0.9, min(work.now, 10) * 8))
    assert changes(pulse, clock, work, 300) <= 30 * 4 + 11


def test_the_real_clocks_work():
    progress = Progress()
    pulse = Pulse(progress, 30)
    progress.tick()
    assert pulse.take_beat() == Heartbeat(1, False)
