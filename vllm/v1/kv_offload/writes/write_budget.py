"""How many bytes a day go to a disk: drives wear out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

_DAY_S = 86_400.0
# With less left, only what pays for sure is written.
_SCARCE_SHARE = 0.5


class WriteBudget:
    """A day's bytes, which come back evenly; a restart does not renew them.

    Owns: what is left.

    Args:
        bytes_per_day: What may be written a day; None: anything.
        clock: Monotonic seconds.
        unix_clock: Seconds since 1970, for the time between two lives: it may be set.
    """

    def __init__(
        self,
        bytes_per_day: int | None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._per_day = bytes_per_day
        self._clock = clock
        self._unix_clock = unix_clock
        self._left = float(bytes_per_day or 0)
        self._at = clock()

    def use_clock(self, clock: Callable[[], float], unix_clock: Callable[[], float]) -> None:
        """Let time pass by clocks of the caller's."""
        self._renew()
        self._clock, self._unix_clock, self._at = clock, unix_clock, clock()

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._per_day is not None

    def _renew(self) -> None:
        now = self._clock()
        self._pass(now - self._at)
        self._at = now

    def _pass(self, seconds: float) -> None:
        passed = min(_DAY_S, max(0.0, seconds))
        if self._per_day is not None:
            self._left = min(self._per_day, self._left + self._per_day * passed / _DAY_S)

    @property
    def is_scarce(self) -> bool:
        """Whether only what was wanted twice shall be written."""
        self._renew()
        return self._per_day is not None and self._left < self._per_day * _SCARCE_SHARE

    def allows(self, num_bytes: int) -> bool:
        """Whether a write may be begun."""
        self._renew()
        return self._per_day is None or num_bytes <= self._left

    def spend(self, num_bytes: int) -> None:
        """Count a write."""
        self._left -= num_bytes

    def to_json(self) -> str:
        """Write down what is left, for the next start."""
        self._renew()
        return json.dumps({"left": self._left, "at": self._unix_clock()})

    def resume(self, text: str) -> None:
        """Go on with what an earlier run had left; what is not that changes nothing."""
        try:
            found = json.loads(text)
            left, at = float(found["left"]), float(found["at"])
        except (KeyError, TypeError, ValueError):
            return
        if self._per_day is not None and left >= 0:
            self._left, self._at = min(left, self._per_day), self._clock()
            self._pass(self._unix_clock() - at)
