"""Speculative decoding: which drafter, and how much it drafts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from vllm.exceptions import ConfigError

ASSISTANT = "gemma4_assistant"
METHODS = ("mtp", "ngram", ASSISTANT)
MAX_MTP_TOKENS = 4
MAX_ASSISTANT_TOKENS = 8
MAX_NGRAM_TOKENS = 32
# Where ngram decides by itself how much to draft.
MAX_WEIGHED_TOKENS = 8
# Of the file of a block that drafts.
_GGUF = ".gguf"
STALE_ROWS = ("rebuild", "keep", "drop")
_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_KEYS = ("method", "model", *_NUMBERS, "stale_row")
# Asks for no drafts where there would be some.
NO_DRAFTS = MappingProxyType({"method": "none"})
# Where nobody asked, steps of more requests draft nothing.
_UNASKED_REQUESTS = 2


@dataclass
class SpeculativeConfig:
    """A drafter and how many tokens it drafts.

    Attributes:
        model: Name of the drafter; "ngram" implies that method. gemma4_assistant: its checkpoint.
            mtp: The GGUF file of the block, where the model's own file has none.
        num_speculative_tokens: Draft tokens a step; where drafts are weighed, the most.
        method: "ngram", "mtp", "gemma4_assistant" or "eagle"; None: from ``model``. The server
            offers no "eagle".
        prompt_lookup_max: ngram: most last tokens that are looked up.
        prompt_lookup_min: ngram: fewest last tokens that must match.
        weighs_drafts: ngram: whether each step drafts only as much as pays. Asked for by leaving
            ``num_speculative_tokens`` out.
        most_requests: Where drafts are weighed: steps of more requests draft nothing; None: any do.
        is_unasked: Whether nobody asked for drafts: they are made only where none changes a bit.
        stale_row: mtp: what becomes, after a prefix hit, of the drafter's one row that another next
            token made: "rebuild" makes it anew, "keep" leaves it, "drop" shortens the hit.
    """

    model: str | None = None
    num_speculative_tokens: int = 1
    method: str | None = None
    target_model_config: Any = None
    target_parallel_config: Any = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    weighs_drafts: bool = False
    most_requests: int | None = None
    is_unasked: bool = False
    stale_row: str = "rebuild"

    def __post_init__(self) -> None:
        if self.method is None:
            self.method = "ngram" if self.model in ("ngram", "[ngram]") else "eagle"
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be at least 1."
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be at least 1 and at most "
                f"prompt_lookup_max={self.prompt_lookup_max}."
            )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "SpeculativeConfig":
        """Take the value of ``--speculative-config``.

        Raises:
            ConfigError: A key, the method or a number is not one that the server offers.
        """
        unknown = sorted(set(raw) - set(_KEYS))
        if unknown:
            raise ConfigError(
                f"speculative-config has unknown keys {', '.join(map(repr, unknown))}: use "
                f"{', '.join(_KEYS)}."
            )
        values = dict(raw)
        method = values.get("method") or values.get("model")
        if method == "[ngram]":
            method = "ngram"
        elif method == "deepseek_mtp":
            # The same drafter, under its model family's name.
            method = "mtp"
        if method not in METHODS:
            raise ConfigError(
                f"speculative-config method {method!r} is not supported: use "
                f"{' or '.join(METHODS)}, or {json.dumps(dict(NO_DRAFTS))} alone for no drafts."
            )
        if method == ASSISTANT:
            if not isinstance(values.get("model"), str) or values["model"] == ASSISTANT:
                raise ConfigError(
                    f"speculative-config method {method!r} needs 'model': the assistant's folder "
                    "or hub name."
                )
        elif values.get("model") not in (None, method, f"[{method}]") and not (
            method == "mtp" and str(values["model"]).endswith(_GGUF)
        ):
            raise ConfigError(
                f"speculative-config model {values['model']!r} does not go with method "
                f"{method!r}: leave it out, there are no separate draft models but the GGUF file "
                "of an MTP block."
            )
        if values.get("stale_row", "rebuild") not in STALE_ROWS:
            raise ConfigError(
                f"speculative-config stale_row={values['stale_row']!r} is not valid: use "
                f"{', '.join(STALE_ROWS)}."
            )
        if method != "mtp" and "stale_row" in values:
            raise ConfigError(f"stale_row needs method 'mtp': {method} has no rows in the cache.")
        for key in _NUMBERS:
            if key in values and type(values[key]) is not int:
                raise ConfigError(f"speculative-config {key}={values[key]!r} must be a number.")
        if method != "ngram" and any(key.startswith("prompt_lookup") for key in values):
            raise ConfigError("prompt_lookup_max and prompt_lookup_min need method 'ngram'.")
        limits = {"mtp": MAX_MTP_TOKENS, ASSISTANT: MAX_ASSISTANT_TOKENS}
        limit = limits.get(method, MAX_NGRAM_TOKENS)
        if values.get("num_speculative_tokens", 1) > limit:
            raise ConfigError(
                f"num_speculative_tokens={values['num_speculative_tokens']} is too many for method "
                f"{method!r}: use 1 to {limit}."
            )
        if method == "ngram" and "num_speculative_tokens" not in values:
            values |= {"num_speculative_tokens": MAX_WEIGHED_TOKENS, "weighs_drafts": True}
            if not any(key in values for key in _NUMBERS[1:]):
                # A longer match is right more often, which is weighed too.
                values |= {"prompt_lookup_max": MAX_WEIGHED_TOKENS, "prompt_lookup_min": 1}
        if "prompt_lookup_max" in values:
            values.setdefault("prompt_lookup_min", min(2, values["prompt_lookup_max"]))
        elif "prompt_lookup_min" in values:
            values["prompt_lookup_max"] = max(4, values["prompt_lookup_min"])
        return cls(**{**values, "method": method})

    @classmethod
    def unasked(cls) -> "SpeculativeConfig":
        """Return what drafts where nobody said what does."""
        config = cls.from_dict({"method": "ngram"})
        return replace(config, most_requests=_UNASKED_REQUESTS, is_unasked=True)

    @property
    def usual_drafts(self) -> int:
        """Drafts that a request usually gets in a step: where they are weighed, most get none."""
        return 0 if self.weighs_drafts else self.num_speculative_tokens

    @property
    def drafts_file(self) -> str | None:
        """The GGUF file of the block that drafts; None: it is in the model's own, if anywhere."""
        is_file = self.method == "mtp" and str(self.model).endswith(_GGUF)
        return self.model if is_file else None

    def use_eagle(self) -> bool:
        """Whether the drafter's KV rows depend on the next token (EAGLE, MTP)."""
        return self.method in ("eagle", "eagle3", "mtp")
