"""Draws are those of the seed alone."""

import pytest

from vllm.benchmarks.arrivals import Arrivals, trace_times_s
from vllm.benchmarks.draws import Draws
from vllm.exceptions import ConfigError


def test_the_sequence_is_pinned() -> None:
    """Whoever changes it changes all prompts: results before and after do not compare."""
    draws = Draws(0)
    assert [draws.below(1000) for _ in range(5)] == [844, 757, 420, 258, 511]
    assert Draws(0).shuffled(range(6)) == [2, 4, 0, 1, 3, 5]
    assert Draws(1, 2).gamma(0.5, 1.0) == pytest.approx(2.2016383192529907, rel=1e-12)


@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_gamma_has_the_mean_and_the_spread(shape: float) -> None:
    draws = Draws(3)
    values = [draws.gamma(shape, 2.0) for _ in range(4000)]
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    assert mean == pytest.approx(2.0, rel=0.12)
    assert variance == pytest.approx(4.0 / shape, rel=0.25)


def test_an_infinite_shape_is_the_mean() -> None:
    assert Draws(3).gamma(float("inf"), 2.0) == 2.0


def test_arrivals_offer_the_rate_that_was_asked_for() -> None:
    times = Arrivals(rate=20.0, burstiness=0.5).times_s(200, 1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(10.0)
    assert Arrivals().times_s(3, 1) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_a_ramp_gets_denser(kind: str) -> None:
    times = Arrivals(ramp_up=kind, ramp_start=1.0, ramp_end=20.0).times_s(300, 0)
    assert times[99] > 2 * (times[299] - times[200])


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 0.0},
        {"rate": 5.0, "burstiness": 0.0},
        {"ramp_up": "linear"},
        {"ramp_up": "linear", "ramp_start": 0.0, "ramp_end": 1.0},
        {"ramp_up": "linear", "ramp_start": 1.0, "ramp_end": 2.0, "rate": 3.0},
        {"ramp_up": "steep", "ramp_start": 1.0, "ramp_end": 2.0},
    ],
)
def test_senseless_arrivals_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Arrivals(**values)  # type: ignore[arg-type]


def test_a_trace_can_go_faster() -> None:
    assert trace_times_s([5.0, 7.0, 11.0], 2.0) == [0.0, 1.0, 3.0]
    with pytest.raises(ConfigError, match="trace-speed"):
        trace_times_s([1.0], 0.0)
