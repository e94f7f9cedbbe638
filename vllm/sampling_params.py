"""What a request asks of the sampler and of the stop rules."""

from enum import IntEnum
from typing import Any

import msgspec

from vllm.exceptions import UserInputError

_SAMPLING_EPS = 1e-5
_MIN_TEMPERATURE = 1e-2
MAX_N = 16384


class RequestOutputKind(IntEnum):
    """How the outputs of a request are delivered."""

    CUMULATIVE = 0  # every output holds everything so far
    DELTA = 1  # every output holds what is new
    FINAL_ONLY = 2  # one output, at the end


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """A grammar the output must follow; exactly one field is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """Stop a sequence whose tail repeats a pattern.

    A pattern of ``min_pattern_size or 1`` to ``max_pattern_size`` tokens repeated at least
    ``min_count`` times ends the request; ``max_pattern_size`` 0 or ``min_count`` < 2 turns it off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Sampling and stop rules of one request, checked when built.

    Raises:
        UserInputError: A value is outside its range; ``param`` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None or -1: not seeded
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None  # -1: the whole vocabulary
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    # Set by update_from_generation_config, not by users.
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        if any(not text for text in self.stop):
            raise UserInputError("stop holds an empty string: give at least one character.", "stop")
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.seed == -1:
            self.seed = None
        if self.skip_reading_prefix_cache is None:
            # Prompt logprobs need every prompt position's logits, so nothing may be skipped.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None
        if self.temperature < _SAMPLING_EPS:
            self._make_greedy()
        elif self.temperature < _MIN_TEMPERATURE:
            self.temperature = _MIN_TEMPERATURE

    def _make_greedy(self) -> None:
        if self.n > 1:
            raise UserInputError(
                f"n={self.n} with temperature 0 would return equal answers: use n=1 or a "
                "temperature above 0.",
                "n",
            )
        self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0

    def _check_ranges(self) -> None:
        checks: list[tuple[str, object, bool, str]] = [
            ("n", self.n, 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}"),
            ("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "between 0 and 2"),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= -1, "-1 or 0 (off) or positive"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0"),
        ]
        if self.max_tokens is not None:
            checks.append(("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"))
            enough = self.min_tokens <= self.max_tokens
            checks.append(
                ("min_tokens", self.min_tokens, enough, f"at most max_tokens={self.max_tokens}")
            )
        if self.seed is not None:
            fits = -(2**63) <= self.seed < 2**63
            checks.append(("seed", self.seed, fits, "a signed 64-bit integer"))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                checks.append((name, value, value >= -1, "-1 (all) or at least 0"))
        for name, value, holds, rule in checks:
            if not holds:
                raise UserInputError(f"{name} must be {rule}, got {value}.", name)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _SAMPLING_EPS

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Take the model's end-of-sequence ids.

        Args:
            generation_config: The checkpoint's generation_config.json; its ``eos_token_id`` may be
                a list, whose further ids become stop tokens.
            eos_token_id: The tokenizer's id; None is kept with ``ignore_eos``.
        """
        if self.ignore_eos:
            return
        self.eos_token_id = eos_token_id
        extra = generation_config.get("eos_token_id")
        if extra is None:
            return
        ids = extra if isinstance(extra, list) else [extra]
        assert self.stop_token_ids is not None
        known = set(self.stop_token_ids)
        self.stop_token_ids += [i for i in ids if i != eos_token_id and i not in known]

    def clone(self) -> "SamplingParams":
        """Return an independent copy (children of a request with n > 1 get their own seeds)."""
        return msgspec.convert(msgspec.to_builtins(self), SamplingParams)
