"""Whether restoring a prefix is quicker than computing it, by what was measured so far."""

from __future__ import annotations

from dataclasses import dataclass, field

# Before anything is measured.
_BYTES_PER_S = 500e6
_DELAY_S = 0.003
# Restoring must be clearly quicker: both are estimates.
_MARGIN = 1.25
_WEIGHT = 0.2
# Steps with fewer tokens say little of prefill.
_MIN_TOKENS = 32


@dataclass
class Rates:
    """Rates of loads and of prefill, as moving averages.

    Attributes:
        bytes_per_s: Of verified reads.
        tokens_per_s: Of prefill, by the power of two of the context.
    """

    bytes_per_s: float = _BYTES_PER_S
    tokens_per_s: dict[int, float] = field(default_factory=dict)

    def note_restore(self, num_bytes: int, seconds: float) -> None:
        """Take a load into account."""
        if num_bytes and seconds > _DELAY_S:
            rate = num_bytes / (seconds - _DELAY_S)
            self.bytes_per_s += _WEIGHT * (rate - self.bytes_per_s)

    def note_prefill(self, context: int, num_tokens: int, seconds: float) -> None:
        """Take a step into account that computed so many prompt tokens behind a context."""
        if num_tokens < _MIN_TOKENS or seconds <= 0:
            return
        bucket, rate = context.bit_length(), num_tokens / seconds
        known = self.tokens_per_s.get(bucket)
        self.tokens_per_s[bucket] = rate if known is None else known + _WEIGHT * (rate - known)

    def restore_s(self, num_bytes: int, num_queued: int = 0) -> float:
        """Return the seconds that a load of so many bytes takes, behind so many others."""
        return _DELAY_S + (num_bytes + num_queued) / self.bytes_per_s

    def compute_s(self, start: int, end: int) -> float | None:
        """Return the seconds that computing tokens ``[start, end)`` takes; None: not known yet."""
        if not self.tokens_per_s:
            return None
        seconds, position = 0.0, start
        while position < end:
            bucket = position.bit_length()
            stop = min(end, 1 << bucket)
            seconds += (stop - position) / self._rate(bucket)
            position = stop
        return seconds

    def _rate(self, bucket: int) -> float:
        nearest = min(self.tokens_per_s, key=lambda known: abs(known - bucket))
        return self.tokens_per_s[nearest]

    def pays(self, num_bytes: int, start: int, end: int, num_queued: int = 0) -> bool:
        """Whether restoring beats computing tokens ``[start, end)``."""
        computing = self.compute_s(start, end)
        if computing is None:
            return True
        return _MARGIN * self.restore_s(num_bytes, num_queued) < computing
