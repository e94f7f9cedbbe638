"""How long a step takes: a sum of what it computes, with coefficients fitted to measured steps."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from vllm.exceptions import ConfigError

_MIN_STEPS = 8


@dataclass(slots=True)
class StepShape:
    """What a step computes.

    Attributes:
        prefill_tokens: Prompt tokens.
        prefill_context: Over prompt tokens, the tokens each attends to.
        decode_tokens: Tokens of requests that generate, drafts included.
        decode_seqs: Those requests.
        decode_context: Over those requests, the tokens each attends to.
    """

    prefill_tokens: int = 0
    prefill_context: int = 0
    decode_tokens: int = 0
    decode_seqs: int = 0
    decode_context: int = 0

    def add(self, start: int, num_tokens: int, *, is_decode: bool) -> None:
        """Count a request's tokens from position ``start`` on."""
        if is_decode:
            self.decode_tokens += num_tokens
            self.decode_seqs += 1
            self.decode_context += start + num_tokens
        else:
            self.prefill_tokens += num_tokens
            self.prefill_context += num_tokens * start + num_tokens * num_tokens // 2

    def features(self) -> tuple[float, ...]:
        """Return what the coefficients of ``CostModel`` multiply, in their order."""
        return (
            1.0,
            float(self.prefill_tokens),
            float(self.prefill_context),
            float(self.decode_tokens),
            float(self.decode_context),
        )


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step.

    The step's fixed share covers launches and weights that every step reads; what grows with a
    prompt's length, its attention, and what grows with running answers comes on top. With
    DeepSeek-V4 attention reads compressed entries, so the context terms are small.

    Attributes:
        per_step: Seconds of any step.
        per_prefill_token: Per prompt token.
        per_prefill_context: Per pair of a prompt token and one it attends to.
        per_decode_token: Per generated token.
        per_decode_context: Per token that a generated one attends to.
    """

    per_step: float
    per_prefill_token: float
    per_prefill_context: float = 0.0
    per_decode_token: float = 0.0
    per_decode_context: float = 0.0

    def __post_init__(self) -> None:
        values = asdict(self)
        if any(value < 0 for value in values.values()) or not any(values.values()):
            raise ConfigError(f"A cost model needs coefficients from 0, one above it: {values}.")

    @classmethod
    def published_a3(cls) -> "CostModel":
        """Return coefficients for DeepSeek-V4-Flash on eight NPUs of an A3.

        Calibrated on one published measurement without hits (8,192 tokens in, 1,024 out, 32 at a
        time); ``benchmarks/published_case.py`` tells how, and what is assumed.
        """
        return cls(per_step=0.02278, per_prefill_token=9.939e-5, per_decode_token=7.91e-5)

    def seconds(self, shape: StepShape) -> float:
        """Return how long a step takes."""
        return (
            self.per_step
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_prefill_context * shape.prefill_context
            + self.per_decode_token * shape.decode_tokens
            + self.per_decode_context * shape.decode_context
        )

    def save(self, path: Path) -> None:
        """Write the coefficients."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Read the coefficients.

        Raises:
            ConfigError: The file does not hold them.
        """
        names = [f.name for f in fields(cls)]
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{name: float(raw[name]) for name in names if name in raw})
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} holds no cost model: it must be a JSON object with {', '.join(names)} in "
                f"seconds ({error})."
            ) from error

    @classmethod
    def fit(cls, shapes: Sequence[StepShape], seconds: Sequence[float]) -> "CostModel":
        """Return the coefficients, none below 0, that come nearest to measured steps.

        Relative errors are made small, so that many short decode steps and few long prefill steps
        both count; then the slowest twentieth is left out (a machine pauses now and then) and the
        fit repeated.

        Raises:
            ConfigError: There are too few steps.
        """
        if len(shapes) < _MIN_STEPS:
            raise ConfigError(f"A fit needs {_MIN_STEPS} steps or more, not {len(shapes)}.")
        rows = np.array([shape.features() for shape in shapes])
        times = np.array(seconds)
        coefficients = _solve(rows, times)
        excess = times / np.maximum(rows @ coefficients, 1e-9)
        kept = excess <= np.quantile(excess, 0.95)
        coefficients = _solve(rows[kept], times[kept])
        return cls(*(float(c) for c in coefficients))


def _solve(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return least-squares coefficients from 0 up: those that come out below are held at 0."""
    scaled = rows / times[:, None]
    wanted = np.ones(len(times))
    # Columns of one size, for a well-conditioned solution.
    sizes = np.maximum(np.abs(scaled).max(axis=0), 1e-30)
    active = [i for i in range(rows.shape[1]) if np.any(rows[:, i])]
    while True:
        found, *_ = np.linalg.lstsq(scaled[:, active] / sizes[active], wanted, rcond=None)
        if np.all(found >= 0) or len(active) == 1:
            break
        del active[int(np.argmin(found))]
    coefficients = np.zeros(rows.shape[1])
    coefficients[active] = np.maximum(found, 0) / sizes[active]
    return coefficients
