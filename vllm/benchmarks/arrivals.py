"""When requests are sent."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.benchmarks.draws import Draws
from vllm.benchmarks.flags import RAMP_UPS
from vllm.exceptions import ConfigError

_STREAM = 7


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests come.

    Attributes:
        rate: Requests per second; infinite: all at once.
        burstiness: 1: a Poisson process; below it burstier, above it more even.
        ramp_up: One of ``RAMP_UPS``; None: a constant rate.
        ramp_start: Requests per second at the beginning of the ramp.
        ramp_end: And at its end.

    Raises:
        ConfigError: The values do not go together.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    ramp_up: str | None = None
    ramp_start: float | None = None
    ramp_end: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"--request-rate {self.rate} must be above 0, or inf.")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness {self.burstiness} must be above 0.")
        if self.ramp_up is None:
            return
        if self.ramp_up not in RAMP_UPS:
            raise ConfigError(
                f"--ramp-up-strategy {self.ramp_up!r} is unknown: use one of {', '.join(RAMP_UPS)}."
            )
        if self.ramp_start is None or self.ramp_end is None:
            raise ConfigError("A ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps.")
        if min(self.ramp_start, self.ramp_end) <= 0:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps must be above 0.")
        if self.rate != float("inf"):
            raise ConfigError("--request-rate and a ramp-up exclude each other: leave one out.")

    def _rate_at(self, share: float) -> float:
        """Return the rate after this share of the requests."""
        if self.ramp_up is None:
            return self.rate
        assert self.ramp_start is not None
        assert self.ramp_end is not None
        if self.ramp_up == "linear":
            return self.ramp_start + (self.ramp_end - self.ramp_start) * share
        return float(self.ramp_start * (self.ramp_end / self.ramp_start) ** share)

    def times_s(self, num_requests: int, seed: int) -> list[float]:
        """Return when each request is sent, in seconds from the start.

        At a constant rate the last comes after ``num_requests / rate`` exactly, so that runs of
        different seeds offer the same load.
        """
        draws = Draws(seed, _STREAM)
        times: list[float] = []
        now = 0.0
        for i in range(num_requests):
            rate = self._rate_at(i / max(1, num_requests - 1))
            if rate != float("inf"):
                now += draws.gamma(self.burstiness, 1.0 / rate)
            times.append(now)
        if self.ramp_up is None and now > 0:
            scale = num_requests / self.rate / now
            times = [time * scale for time in times]
        return times


def trace_times_s(arrivals_s: Sequence[float], speed: float) -> list[float]:
    """Return a trace's arrival times from its first on, ``speed`` times as fast.

    Raises:
        ConfigError: The speed is not above 0.
    """
    if not speed > 0:
        raise ConfigError(f"--trace-speed {speed} must be above 0.")
    first = min(arrivals_s, default=0.0)
    return [(time - first) / speed for time in arrivals_s]
