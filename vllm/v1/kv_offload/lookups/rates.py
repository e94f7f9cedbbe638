"""Whether restoring a prefix is quicker than computing it, by what was measured so far."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

# Before anything is measured.
_BYTES_PER_S = 500e6
_HOST_BYTES_PER_S = 4e9
_DELAY_S = 0.003
# Restoring must be clearly quicker: both are estimates.
_MARGIN = 1.25
_WEIGHT = 0.2
# Steps with fewer tokens say little of prefill.
_MIN_TOKENS = 32
# Steps with at most so many tokens take what any step takes.
_FEW_TOKENS = 4
# Of a step's time, what its tokens take at least.
_MIN_SHARE = 0.25
# Contexts are below 2 to this power.
_MAX_BUCKET = 64
# No step took longer.
_MAX_STEP_S = 3600.0


@dataclass
class Rates:
    """Rates of loads and of prefill, as moving averages.

    Attributes:
        bytes_per_s: Of verified reads from the disk.
        host_bytes_per_s: Of those from host memory.
        tokens_per_s: Of prefill, by the power of two of the context, beyond what a step takes
            however few tokens it computes: that is spent with a load and without.
        step_s: What a step takes however few tokens it computes, in seconds.
    """

    bytes_per_s: float = _BYTES_PER_S
    host_bytes_per_s: float = _HOST_BYTES_PER_S
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    step_s: float = 0.0

    def note_restore(self, num_bytes: int, seconds: float, *, is_host: bool = False) -> None:
        """Take a load into account that came from one place."""
        if not num_bytes or seconds <= _DELAY_S:
            return
        rate = num_bytes / (seconds - _DELAY_S)
        if is_host:
            self.host_bytes_per_s += _WEIGHT * (rate - self.host_bytes_per_s)
        else:
            self.bytes_per_s += _WEIGHT * (rate - self.bytes_per_s)

    def note_step(self, context: int, num_tokens: int, seconds: float) -> None:
        """Take a step into account that computed so many tokens, most of them behind a context."""
        if seconds <= 0:
            return
        if num_tokens <= _FEW_TOKENS:
            self.step_s += (_WEIGHT if self.step_s else 1.0) * (seconds - self.step_s)
        elif num_tokens >= _MIN_TOKENS:
            beyond = max(seconds - self.step_s, _MIN_SHARE * seconds)
            bucket, rate = context.bit_length(), num_tokens / beyond
            known = self.tokens_per_s.get(bucket)
            self.tokens_per_s[bucket] = rate if known is None else known + _WEIGHT * (rate - known)

    def restore_s(self, num_bytes: int, num_queued: int = 0, num_host: int = 0) -> float:
        """Return the seconds that a load takes, with a step that may run before it.

        Args:
            num_bytes: Bytes from the disk.
            num_queued: Bytes from the disk that come first.
            num_host: Bytes from host memory.
        """
        from_disk = (num_bytes + num_queued) / self.bytes_per_s
        return _DELAY_S + self.step_s + from_disk + num_host / self.host_bytes_per_s

    def compute_s(self, start: int, end: int) -> float | None:
        """Return the seconds by which tokens ``[start, end)`` lengthen steps; None: not known."""
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

    def cost_s(
        self, num_bytes: int, resumes_at: int, end: int, num_queued: int = 0, num_host: int = 0
    ) -> float | None:
        """Return the seconds that a load and computing the rest of a prompt take.

        Loads count for more than they take: both are estimates, and restoring must be clearly
        quicker.

        Args:
            num_bytes: Bytes from the disk.
            resumes_at: From where on tokens are computed.
            end: Tokens of the prompt.
            num_queued: Bytes from the disk that come first.
            num_host: Bytes from host memory.

        Returns:
            None: It is not known yet how quick computing is.
        """
        computing = self.compute_s(resumes_at, end)
        if computing is None:
            return None
        return _MARGIN * self.restore_s(num_bytes, num_queued, num_host) + computing

    def to_json(self) -> str:
        """Write the rates down, for the next start."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rates:
        """Read what an earlier run measured; what is not a rate is left at its default."""
        try:
            found = json.loads(text)
        except ValueError:
            return cls()
        rates = cls()
        if not isinstance(found, dict):
            return rates
        for name in ("bytes_per_s", "host_bytes_per_s"):
            if _is_rate(found.get(name)):
                setattr(rates, name, float(found[name]))
        step_s = found.get("step_s")
        if isinstance(step_s, int | float) and 0 <= step_s < _MAX_STEP_S:
            rates.step_s = float(step_s)
        by_context = found.get("tokens_per_s")
        for bucket, rate in by_context.items() if isinstance(by_context, dict) else ():
            if str(bucket).isdecimal() and int(bucket) <= _MAX_BUCKET and _is_rate(rate):
                rates.tokens_per_s[int(bucket)] = float(rate)
        return rates


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 1 <= value < 1e15
