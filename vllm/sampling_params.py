"""What a request asks of the sampler and of the stop rules."""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from vllm.exceptions import UserInputError

_SAMPLING_EPS = 1e-5
_MIN_TEMPERATURE = 1e-2
MAX_N = 16384
_MAX_LOGIT_BIAS = 100.0
MAX_LOGPROB_IDS = 1024
# What a message between processes holds.
_MAX_COUNT = 1 << 63
# Of ``repetition_detection``: it is looked for at every token.
_MAX_PATTERN, _MAX_REPEATED = 256, 8192
# The ways to say what an answer must look like.
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RequestOutputKind(IntEnum):
    """How the outputs of a request are delivered."""

    CUMULATIVE = 0  # every output holds everything so far
    DELTA = 1  # every output holds what is new
    FINAL_ONLY = 2  # one output, at the end


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """A grammar the answer must follow; exactly one of the first six fields is set.

    With ``SamplingParams.reasoning`` the grammar begins behind the end of the reasoning.

    Attributes:
        json: A JSON schema, as an object or as its text.
        regex: A regular expression that the whole answer matches (Rust's syntax, no look-around).
        choice: The answers to choose from.
        grammar: A Lark grammar with a rule ``start``, or a GBNF one with ``root``. In Lark,
            ``<[128]>`` is a special token by its id, and ``%json {...}`` a schema inline.
        json_object: True: any JSON object.
        structural_tag: Free text with grammars between tags, as JSON; docs/structured_output.md
            lists both forms. Special tokens are written as their text.
        disable_any_whitespace: Whether JSON is written without optional whitespace.
        disable_additional_properties: Whether objects whose schema names properties hold no
            others, unless it says so itself. None: they do not; False: they may.
        whitespace_pattern: A regular expression of the whitespace between JSON tokens.

    Raises:
        UserInputError: None or several of the six are set.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        chosen = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        if len(chosen) != 1:
            found = ", ".join(chosen) or "none"
            raise UserInputError(
                f"structured_outputs must set exactly one of {', '.join(STRUCTURED_KINDS)}, "
                f"got {found}.",
                "structured_outputs",
            )
        if self.choice is not None and not self.choice:
            raise UserInputError(
                "structured_outputs.choice is empty: give at least one answer.",
                "structured_outputs",
            )

    @property
    def kind(self) -> str:
        """Which of the six is set."""
        return next(n for n in STRUCTURED_KINDS if getattr(self, n) not in (None, False))


class ReasoningSpan(msgspec.Struct, omit_defaults=True):
    """Where the reasoning of an answer ends that begins with it.

    Attributes:
        end_token_ids: Tokens that end it, in a row (``</think>``).
        forced_token_ids: What ``thinking_token_budget`` puts behind the last token of reasoning
            that it allows; they end with ``end_token_ids``. None: just these.
        start_token_ids: Tokens that the answer may begin with and that are not counted
            (``<think>``, where the model writes it).
        call_token_ids: Rows of tokens by which a call ends the reasoning, too.
    """

    end_token_ids: list[int]
    forced_token_ids: list[int] | None = None
    start_token_ids: list[int] = []
    call_token_ids: list[list[int]] = []

    @property
    def forced(self) -> list[int]:
        """The tokens that end it by force."""
        return self.end_token_ids if self.forced_token_ids is None else self.forced_token_ids


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """Stop a sequence whose tail repeats a pattern.

    A pattern of ``min_pattern_size or 1`` to ``max_pattern_size`` tokens repeated at least
    ``min_count`` times ends the request; ``max_pattern_size`` 0 or ``min_count`` < 2 turns it off.
    It is looked for at every token, so patterns are at most 256 tokens long, and 8,192 tokens are
    looked at.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


def _between(value: float, low: float, high: float) -> tuple[bool, str]:
    return low <= value <= high, f"between {low} and {high}"


def _repetition_checks(given: RepetitionDetectionParams) -> list[tuple[str, object, bool, str]]:
    """What a pattern's sizes must be, as (name, value, whether it is so, rule)."""
    longest, shortest = given.max_pattern_size, given.min_pattern_size
    name = "repetition_detection"
    sizes = [(field, getattr(given, field)) for field in type(given).__struct_fields__]
    kinds = [
        (f"{name}.{field}", size, type(size) is int, "a whole number") for field, size in sizes
    ]
    if not all(is_whole for *_, is_whole, _ in kinds):
        return kinds
    most = _MAX_REPEATED // max(1, longest)
    is_on = longest > 0 and given.min_count > 1
    return [
        (
            f"{name}.max_pattern_size",
            *(longest, 0 <= longest <= _MAX_PATTERN, f"between 0 (off) and {_MAX_PATTERN}"),
        ),
        (
            f"{name}.min_pattern_size",
            *(shortest, shortest >= 0 and (shortest <= longest or not is_on)),
            f"between 0 and max_pattern_size={longest}",
        ),
        (
            f"{name}.min_count",
            *(given.min_count, 0 <= given.min_count <= most),
            f"between 0 (off) and {most} for max_pattern_size={longest}",
        ),
    ]


def _clean_bias(logit_bias: Mapping[Any, float]) -> dict[int, float]:
    """Return a bias with whole keys (they are texts in JSON), and values within their limits."""
    clean: dict[int, float] = {}
    for key, bias in logit_bias.items():
        try:
            token_id = int(key)
        except (TypeError, ValueError):
            raise UserInputError(
                f"logit_bias holds the key {str(key)[:40]!r}: keys are token ids.", "logit_bias"
            ) from None
        if math.isnan(bias):
            raise UserInputError(f"logit_bias of token {token_id} is no number.", "logit_bias")
        clean[token_id] = max(-_MAX_LOGIT_BIAS, min(_MAX_LOGIT_BIAS, float(bias)))
    return clean


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """Sampling and stop rules of one request, checked when built.

    Attributes:
        presence_penalty: Taken from the logits of tokens that stand in the answer.
        frequency_penalty: The same for each time that they do.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens that
            stand in the prompt or the answer.
        logit_bias: Added to the logits of tokens by id, cut to -100 and 100.
        allowed_token_ids: Only these may be sampled.
        logprob_token_ids: Log probabilities of these are reported, in this order, instead of those
            of the most likely tokens; ``logprobs`` is their number.
        bad_words: Texts that the answer must not hold.
        min_tokens: Tokens before which nothing may end the answer.
        truncate_prompt_tokens: Keep only the prompt's last tokens, this many; -1: as many as leave
            room for ``max_tokens``.
        thinking_token_budget: Tokens of reasoning after which it is ended by force.
        reasoning: Set for an answer that begins inside the model's reasoning; None: it does not.
        bad_words_token_ids: ``bad_words`` as tokens; the engine sets them.

    Raises:
        UserInputError: A value is outside its range; ``param`` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
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
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    reasoning: ReasoningSpan | None = None
    bad_words_token_ids: list[list[int]] | None = None
    # Set by update_from_generation_config, not by users.
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        try:
            self._settle()
        except TypeError as error:
            raise _name_wrong_type(self) or error from error

    def _settle(self) -> None:
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
        # Whatever is beyond every vocabulary filters nothing.
        self.top_k = min(self.top_k, _MAX_COUNT - 1)
        self._check_word_lists()
        self._settle_logprob_ids()
        if self.logit_bias:
            self.logit_bias = _clean_bias(self.logit_bias)
        if self.skip_reading_prefix_cache is None:
            # Where prompt logprobs are wanted the engine finds what may be skipped; of a whole
            # vocabulary's nothing is kept.
            self.skip_reading_prefix_cache = self.prompt_logprobs == -1
        if self.temperature < _SAMPLING_EPS:
            self._make_greedy()
        elif self.temperature < _MIN_TEMPERATURE:
            self.temperature = _MIN_TEMPERATURE

    def _check_word_lists(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserInputError(
                "allowed_token_ids is empty: give at least one token id, or leave it out.",
                "allowed_token_ids",
            )
        if any(not word for word in self.bad_words or ()):
            raise UserInputError(
                "bad_words holds an empty text: give at least one character.", "bad_words"
            )

    def _settle_logprob_ids(self) -> None:
        ids = self.logprob_token_ids
        if ids is None:
            return
        if not 0 < len(ids) <= MAX_LOGPROB_IDS or len(set(ids)) < len(ids):
            raise UserInputError(
                f"logprob_token_ids holds {len(ids)} ids: give 1 to {MAX_LOGPROB_IDS} different "
                "ones.",
                "logprob_token_ids",
            )
        if self.logprobs not in (None, len(ids)):
            raise UserInputError(
                f"logprobs={self.logprobs} with logprob_token_ids: leave logprobs out, or make it "
                f"their number, {len(ids)}.",
                "logprobs",
            )
        self.logprobs = len(ids)

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
            ("presence_penalty", self.presence_penalty, *_between(self.presence_penalty, -2, 2)),
            ("frequency_penalty", self.frequency_penalty, *_between(self.frequency_penalty, -2, 2)),
            (
                "repetition_penalty",
                self.repetition_penalty,
                0.0 < self.repetition_penalty < math.inf,
                "above 0",
            ),
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
        for name, least in (("thinking_token_budget", 0), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None:
                rule = f"at least {least} and below {_MAX_COUNT}"
                checks.append((name, value, least <= value < _MAX_COUNT, rule))
        if self.repetition_detection is not None:
            checks += _repetition_checks(self.repetition_detection)
        if self.truncate_prompt_tokens == 0:
            checks.append(("truncate_prompt_tokens", 0, False, "-1 or at least 1"))
        if self.seed is not None:
            fits = -(2**63) <= self.seed < 2**63
            checks.append(("seed", self.seed, fits, "a signed 64-bit integer"))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                checks.append((name, value, value >= -1, "-1 (all) or at least 0"))
        for name, value, holds, rule in checks:
            if not holds:
                raise UserInputError(f"{name} must be {rule}, got {str(value)[:60]}.", name)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < _SAMPLING_EPS

    @property
    def follows_answer(self) -> bool:
        """Whether the answer's own tokens decide about its next one, before any is drawn."""
        has_words = any(len(ids) > 1 for ids in self.bad_words_token_ids or ())
        has_budget = self.thinking_token_budget is not None and self.reasoning is not None
        has_penalties = (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
        return has_words or has_budget or has_penalties

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
        """Return an independent copy (children of a request with n > 1 get their own seeds).

        Raises:
            UserInputError: A field is of the wrong type.
        """
        try:
            return msgspec.convert(msgspec.to_builtins(self), SamplingParams)
        except msgspec.ValidationError as error:
            raise _name_wrong_type(self) or error from error


def _name_wrong_type(params: SamplingParams) -> UserInputError | None:
    """Return the error of the first field whose value is of another type than it says."""
    for field in msgspec.structs.fields(SamplingParams):
        try:
            msgspec.convert(getattr(params, field.name), field.type)
        except msgspec.ValidationError as error:
            return UserInputError(f"{field.name}: {error}.", field.name)
    return None
